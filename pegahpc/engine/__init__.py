"""One rank's engine: scheduler, page pool, runner, sampler, and the loop that always steps."""
