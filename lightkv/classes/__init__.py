"""How long layers see a token, or that they keep a state instead (`state.py`): a file for each class of layers,
in integers. Each answers the same questions, of which the last two are of classes that keep tokens:

first_seen(p)    the first entry that has to be there to go on after p tokens
boundary(n)      the most tokens, up to n, after which no earlier one has to be there
first_kept(n)    the first entry that a sequence of n tokens keeps, which may go back by `slack`
gone_at(entry)   the least number of tokens with which it does not keep that entry
reuses           whether a decode step's token takes the slot of the one that passes
"""
