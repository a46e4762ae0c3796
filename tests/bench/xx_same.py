from .same_file import *
def measure(setting, outcome):
    with torch_ranks(1, ranks=RANKS) as ranks:
        begin(setting, ranks)
        judge_time(setting, outcome, ranks, "cold", 0.9)
        judge_time(setting, outcome, ranks, "warm", 1.1)
    clear(setting)
