"""What a record has no room for, in a file of its own: KL of each scored token, kept positions of the first sample."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from kvcompress.measure.quality import Details
from kvcompress.runs.records import write_whole


@dataclass
class StoredDetails:
    """KL(exact || method) in nats of each scored token [T]; kept positions [H, S] of each layer, -1 = empty slot."""

    kl: np.ndarray
    kept: list[np.ndarray]


def details_path(folder: Path, config_hash: str, sample: int) -> Path:
    """Where the details of one record lie."""
    return folder / "details" / f"{config_hash}-{sample}.npz"


def write_details(folder: Path, config_hash: str, sample: int, details: Details) -> None:
    """Writes the details of one record; kept positions only of sample 0. Raises RecordsError if the disk refuses."""
    path = details_path(folder, config_hash, sample)
    path.parent.mkdir(exist_ok=True)
    kept = details.kept if sample == 0 else []
    arrays = {f"kept_{index}": positions.cpu().numpy().astype(np.int32) for index, positions in enumerate(kept)}
    out = io.BytesIO()
    np.savez_compressed(out, allow_pickle=False, kl=details.kl.cpu().numpy().astype(np.float32), **arrays)
    write_whole(path, out.getvalue())


def read_details(folder: Path, config_hash: str, sample: int) -> StoredDetails | None:
    """The details of one record, None where there are none. Raises ValueError for a damaged file."""
    path = details_path(folder, config_hash, sample)
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as content:
            count = sum(name.startswith("kept_") for name in content.files)
            return StoredDetails(content["kl"], [content[f"kept_{index}"] for index in range(count)])
    except (BadZipFile, KeyError, OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path.name} is damaged ({error})") from None
