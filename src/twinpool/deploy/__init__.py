"""Puts workers on machines: a pure plan first, then something that applies it. On this machine for now.

machine ──┐
model  ───┼── plan (pure) ──▶ Plan ──▶ local.Supervisor ──▶ worker processes
wanted ───┘
"""
