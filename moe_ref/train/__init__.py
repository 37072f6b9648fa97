"""Models and training on top of the layer.

replicated, optimizer, replacement, sharded, recompute    replicas in training, for any model with `MoELayer`s
buckets, exchange                                         what they are made of
model, settings, start, job, managers, balancing, commands
                                                          a byte-level MoE model and its training loop, to copy
compare, summary, loads                                   what a run reports and records
pretrain, checkpoint                                      how the model that ships with the package was made
"""
