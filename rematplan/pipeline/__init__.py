"""Pipelines of planned stages: schedules by name, their files."""
