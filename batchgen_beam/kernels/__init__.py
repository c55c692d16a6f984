"""Kernel sets: the arithmetic that models are made of, behind `models.interface.KernelSet`.

Owns batch invariance and speed of single operations.  Does not know architectures, sequences or scheduling.
"""
