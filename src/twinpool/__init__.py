"""Twinpool serves language models from two pools of engines: one reads prompts, one writes tokens."""

from importlib.metadata import version as _version

__version__ = _version("twinpool")
