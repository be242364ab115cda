"""How assets/tiny-moe was made: text, training, export, acceptance. README.md says how to run it."""
