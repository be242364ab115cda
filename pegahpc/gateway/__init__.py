"""HTTP in, batches of updates out: the OpenAI API of a fleet."""
