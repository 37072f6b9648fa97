"""Expert loads recorded while training, for `moe-ref balance --loads` and for studies of one's own.

A file is an npz (no objects inside, so nothing is unpickled) with

    loads     uint32 [layers, steps, experts]    rows of each expert in each optimiser step, all ranks together
    layers    [layers]                           block number of each layer
    steps     [steps]                            step numbers, from 0
    tokens    scalar                             tokens of a step, all ranks together: a row of loads sums to K of them
    top_k     scalar                             K
    about     text                               JSON: the job that made it

`RECORDED` ships with the package: all steps of the default job, from the first one on, where nothing is learned yet.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from moe_ref.train.outcome import Outcome
from moe_ref.train.settings import TrainJob

RECORDED = Path(__file__).parent.parent / "assets" / "train_loads.npz"
"""Loads of the default job; made by `moe-ref train --record moe_ref/assets/train_loads.npz`."""


def write_loads(path: Path, job: TrainJob, outcome: Outcome) -> None:
    """Write the loads of a run (of the steps that this run made, if it was resumed).

    Raises:
        OSError: the file can't be written.
    """
    about = {k: v for k, v in asdict(job).items() if k != "folder"}
    np.savez_compressed(
        path,
        loads=np.stack(outcome.load_TLE, axis=1).astype(np.uint32),
        layers=np.arange(1, job.blocks),
        steps=np.arange(outcome.first_step, outcome.first_step + len(outcome.load_TLE)),
        tokens=np.array(job.sequences * job.context),
        top_k=np.array(job.top_k),
        about=np.array(json.dumps(about)),
    )
