"""Pipelines whose stages follow plans: schedules by name, planning, running under torchrun."""
