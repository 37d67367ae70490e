"""Tasks whose requests, where lm-eval keeps them (`cache_requests`), are found by what they were made from."""

from typing import Any

from lm_eval.api.task import ConfigurableTask

from kvcompress.evals.results import all_versions
from kvcompress.measure.record import digest


class OwnTask(ConfigurableTask):
    """A task of this package. lm-eval's own key is little more than the task's name.

    The documents of one name differ with seed, length, tokenizer or data folder, and requests with the examples drawn
    and the settings of generation.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={name: value for name, value in config.items() if name != "class"})

    def build_all_requests(self, *, cache_requests: bool = False, tokenizer_name: str = "", **settings: Any) -> None:
        """lm-eval's, in whose key the name of the tokenizer is followed by what the requests are made from."""
        if cache_requests:
            made_from = {
                "documents": [dict(document) for document in self.eval_docs],
                "samples": settings.get("samples"),
                "examples": self.sampler.rnd.getstate() if self.config.num_fewshot else None,
                "generation": self.config.generation_kwargs,
                "versions": all_versions(),
            }
            tokenizer_name += f"-{digest(made_from)}"
        super().build_all_requests(cache_requests=cache_requests, tokenizer_name=tokenizer_name, **settings)
