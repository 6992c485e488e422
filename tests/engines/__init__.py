"""Tests with other people's engines: one script for each, run by hand (``make engines
ARGS=NAME``), in no test tier.

``python -m tests.engines NAME`` makes an environment for the script ``NAME.py`` under
``build/engines/NAME``, starts ``rl-caption serve`` where the script asks for it, runs
the script there, and compares what it reports with the scores of the reward called in
process. The first comment of a script is its table of requirements:

    # /// script
    # dependencies = ["verl==0.9.1"]     # installed with what they depend on
    # [tool.engine]
    # alone = ["openrlhf==0.11.2"]       # installed afterwards, without what they depend on
    # without = ["torchaudio"]           # removed afterwards
    # serve = true                       # the address is the environment variable RL_CAPTION_URL
    # vlm = true                         # a tiny Qwen2-VL with random weights is in $ENGINE_FOLDER/qwen2_vl
    # ///

This package is installed there with ``pip install --no-deps``.
"""
