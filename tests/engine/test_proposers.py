from paceline.engine.proposers import catch_up_passes


def test_a_draft_catches_up_in_no_more_than_a_pass_of_the_target_takes():
    assert catch_up_passes(16_000, 270) == 14
    assert catch_up_passes(1000, 270) == 1  # hardly smaller
    assert catch_up_passes(270, 16_000) == 1
