"""``rematplan devices``: list the device models with which the roofline model computes the costs of ops."""

from __future__ import annotations

import argparse

from rematplan.cli.output import Output


def add(parser: argparse.ArgumentParser) -> None:
    """Add nothing to ``parser``: ``rematplan devices`` has no arguments."""
    del parser


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan devices``: list the device models with which the roofline model computes the costs of ops. Return
    the exit status 0."""
    del args

    from rematplan.report.tables import devices_table
    from rematplan.runtime.costs.device_models import DEFAULT_DEVICE_MODEL, DEVICE_MODELS

    rows = [
        {
            "name": model.name,
            "summary": model.summary,
            "default": model.name == DEFAULT_DEVICE_MODEL,
            "teraflops_float32": model.flops["float32"],
            "teraflops_float16": model.flops["float16"],
            "gigabytes_a_second": model.bandwidth,
            "launch_microseconds": model.launch,
        }
        for model in DEVICE_MODELS.values()
    ]
    out.show(devices_table(rows))
    out.data({"devices": rows})
    return 0
