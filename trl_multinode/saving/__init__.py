"""What a run leaves behind: `checkpoints` and `resume` make a stopped run go on; `hub` has pushes checked
(`saved_weights`), tried and told (`pushing`), and described (`model_card`).
"""
