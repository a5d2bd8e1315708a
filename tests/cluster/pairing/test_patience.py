from paceline.cluster.pairing.pairing import is_worth_waiting


def test_a_lone_sequence_waits_for_a_good_draft():
    # 3.7 tokens in 25 ms beat 1 in 15
    assert is_worth_waiting(ready=0, missing=1, gain=2.7, wait=0.010, step=0.015)
    assert not is_worth_waiting(ready=0, missing=1, gain=0.5, wait=0.010, step=0.015)


def test_one_miss_does_not_hold_up_the_others():
    assert not is_worth_waiting(ready=15, missing=1, gain=2.7, wait=0.010, step=0.015)
    assert is_worth_waiting(ready=1, missing=15, gain=2.7, wait=0.010, step=0.015)


def test_a_moment_is_always_worth_it():
    assert is_worth_waiting(ready=15, missing=1, gain=2.7, wait=0.0001, step=0.015)
