"""The persistent MoE megakernel in CuTe DSL on NVSHMEM (backend "fused"), and the chain that it replaces ("unfused").

Needs the extra [fused] and, to run, GPUs of compute capability 9.0. Nothing is imported here: the command line loads
the modules it needs, so that `moe-ref --help` works where the extra is not installed.
"""
