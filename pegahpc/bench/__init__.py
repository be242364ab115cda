"""`pegahpc bench`: drives an endpoint, a fleet's ranks or an engine, and writes numbers that carry their conditions."""
