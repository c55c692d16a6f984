"""Offline LLM batch inference on Apache Beam, built around a sequence-coroutine engine."""
