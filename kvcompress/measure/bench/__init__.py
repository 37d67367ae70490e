"""Times and bytes beside what a user would pick instead, in one run: `kvcompress bench`."""
