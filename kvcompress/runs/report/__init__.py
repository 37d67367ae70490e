"""One page of everything that results folders hold: `kvcompress report DIR…`."""
