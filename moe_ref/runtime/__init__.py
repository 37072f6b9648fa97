"""The actor runtime of a distributed MoE layer, runnable on a laptop. Read in this order:

    encoding, tasks      task words, counters, epochs (shared with the megakernel); task descriptors with their cost
    callplan             the geometry of one call: tiles, segments, who sends what where
    messages             what actors tell each other; transport, data and rules as interfaces
    actors, rank         Gate, Subscriber, Scheduler, Processor; their counters: the protocol itself
    stamps, checker,     random orders and every order of messages, each rule broken once: `moe-ref protocol`
    explorer, cases
    simulator, machine   the same actors in time: discrete events and a cost model
    numbers              the same actors with tensors, equal to the reference layer
    workload, chains,    a layer by its sizes; the execution models to compare with: `moe-ref simulate`
    models
    recorded, calibrate  measured runs, and the fit of a machine to them
    trace, figures,      pictures and tables: `moe-ref trace`, `moe-ref simulate --plot --paper --memory`
    paper, memory

Nothing is imported here, so that the kernel can use `moe_ref.runtime.encoding` alone.
"""
