"""How long layers see a token: a file for each class of layers, in integers, without torch.

Each class answers the questions that `lightkv.layer_groups.Lifetime` documents. `reuses`: whether a decode
step's token takes the slot of the one that passes.
"""
