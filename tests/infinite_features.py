"""The training command with infinite features for one row: `infinite_features.py CONFIG`, for tests."""

import sys

from training import forward, train_drafter

capture = forward.capture


def corrupted(target, tokens, *options, **more):
    # The row of the test data whose first tokens are known; only the rank that holds it sees infinity.
    taps, final = capture(target, tokens, *options, **more)
    taps[tokens[:, 0] == BAD] = float("inf")
    return taps, final


if __name__ == "__main__":
    from training_runs import answer_rows

    BAD = answer_rows(4)[2].prompt_ids[0]
    forward.capture = corrupted
    sys.exit(train_drafter.main(sys.argv[1:]))
