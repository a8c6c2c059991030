"""Pipelines in torch: its schedules' action lists, stages that run plans."""
