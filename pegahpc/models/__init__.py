"""Model lines: each is one file of data; one decoder runs them all."""
