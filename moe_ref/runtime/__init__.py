"""The actor runtime of a distributed MoE layer, runnable on a laptop: tasks, actors, simulator, cost model, trace."""
