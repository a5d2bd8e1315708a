from paceline.engine.graph.executor import pass_kinds
from paceline.models.runner.gpu.passes import PassKind
from paceline.speculation.proposers.suffix import NgramProposer
from tests.fakes import tiny_model
from tests.heads import eagle, medusa


def test_every_proposer_has_the_passes_it_drafts_from():
    target = tiny_model()
    assert pass_kinds([NgramProposer()]) == {PassKind()}
    head = eagle(target)
    assert head.traits.hidden is not None
    layers = head.traits.hidden.layers
    states = PassKind(False, layers, False)
    assert pass_kinds([NgramProposer(), head]) == {PassKind(), states, PassKind(True, layers, False)}
    assert pass_kinds([medusa(target)]) == {PassKind(), PassKind(False, (), True), PassKind(True, (), True)}
