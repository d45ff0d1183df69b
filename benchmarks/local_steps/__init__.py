"""The parts of `benchmarks/gpt.py`. They need only torch, numpy and `paceline.model.codecs`."""
