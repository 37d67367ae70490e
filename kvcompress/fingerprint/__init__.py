"""What tells apart models whose KV must not be mixed."""

from kvcompress.fingerprint.watch import Watch, weights_fingerprint

__all__ = ["Watch", "weights_fingerprint"]
