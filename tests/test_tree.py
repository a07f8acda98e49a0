"""Draft trees: what each builder grows, that heads draft along a path what they draft as a chain, and that decoding with a tree attention
mask gives the target's own text."""

import random
from functools import partial

import pytest
import torch
from conftest import batch_of, head_confs, ready

from data.builtin import build_tiny
from data.check import Reference
from data.target import frozen, spec
from eval.accept import block_verify, rejection_sample
from eval.decode import Reader, decode, greedily, no_drafts, of_head, sampled
from eval.tree import Tree, best_paths, chain_paths, comb_paths, dynamic_tree, sampled_chain, static_tree
from heads import build
from heads.attention import causal_diagonal, causal_diagonal_dense

STEPWISE = ["eagle", "eagle3", "eagle3_32k", "mtp", "mtp_eagle3", "mtp_nonorm", "peagle", "medusa", "hydra", "hydra_plus", "mlp_speculator"]


def toy_levels(seed=0, V=7):
    """A drafter whose distribution after a path is a fixed function of the path; keeps what it was asked for in `asked`."""

    def log_q(path):
        generator = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
        return (2 * torch.randn(V, generator=generator)).log_softmax(-1)

    def levels():
        paths = [()]
        while True:
            parent_R, token_R = yield torch.stack([log_q(path) for path in paths])
            paths = [(*paths[parent], token) for parent, token in zip(parent_R.tolist(), token_R.tolist(), strict=True)]

    return levels(), log_q


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        found[node] = (*found[parent], token)
    return list(found.values())[1:]


def score(log_q, path):
    return sum(log_q(path[:i])[token].item() for i, token in enumerate(path))


def test_a_static_tree_takes_the_ranks_that_its_paths_name():
    levels, log_q = toy_levels()
    paths = [(1,), (0,), (0, 2), (0, 0), (1, 3), (0, 0, 1)]
    found = paths_of(static_tree(levels, paths))
    expected = []
    for ranks in sorted(paths, key=lambda path: (len(path), path)):
        text = ()
        for rank in ranks:
            text = (*text, int(log_q(text).argsort(descending=True)[rank]))
        expected.append(text)
    assert found == expected


@pytest.mark.parametrize(("nodes", "width", "depth"), [(1, 3, 4), (5, 3, 4), (12, 3, 5), (40, 7, 3), (60, 7, 2)])
def test_a_dynamic_tree_is_the_likeliest_of_what_was_expanded(nodes, width, depth):
    """Against EAGLE-2's procedure spelt out, without its early end."""
    levels, log_q = toy_levels(seed=nodes)
    pool, frontier = [], [()]
    for _ in range(depth):
        children = [(*path, int(t)) for path in frontier for t in log_q(path).topk(width).indices]
        pool += children
        frontier = sorted(children, key=lambda path: -score(log_q, path))[:width]
    expected = sorted(pool, key=lambda path: -score(log_q, path))[:nodes]
    found = paths_of(dynamic_tree(levels, nodes, width, depth))
    assert len(found) == min(nodes, len(pool)) and set(found) == set(expected)


def test_a_dynamic_tree_never_takes_what_the_draft_vocabulary_lacks():
    tree = dynamic_tree((log_q_1V for log_q_1V in [torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]]).log()]), 9, 4, 1)
    assert sorted(tree.tokens) == [0, 1]


def test_the_best_static_tree_by_hand():
    rates = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.0]]  # worth: 0.6, 0.3 of (0, 0), 0.2, 0.18 of (0, 1)
    assert best_paths(rates, 4) == [(0,), (0, 0), (1,), (0, 1)]
    assert best_paths([[0.9, 0.1]] * 3, 3) == chain_paths(3)
    everything = best_paths(rates, 100)
    assert len(everything) == 3 + 9 and all(path[:-1] in [(), *everything] for path in everything)
    assert comb_paths(2, 2) == [(0,), (1,), (0, 0), (0, 1)]


def recorded(levels, rows):
    """The same levels; rows[path] is what was yielded after a path."""
    paths, log_q_RV = [()], next(levels)
    while True:
        rows |= zip(paths, log_q_RV, strict=True)
        parent_R, token_R = yield log_q_RV
        log_q_RV = levels.send((parent_R, token_R))
        paths = [(*paths[parent], token) for parent, token in zip(parent_R.tolist(), token_R.tolist(), strict=True)]


def grown_alone(levels, path):
    log_q_1V = next(levels)
    for token in path:
        log_q_1V = levels.send((torch.tensor([0]), torch.tensor([token])))
    return log_q_1V[0]


@pytest.mark.parametrize("name", STEPWISE)
def test_a_head_drafts_along_every_path_as_if_it_were_the_only_one(name):
    head = ready(head_confs()[name])
    batch, k, rows = batch_of(head, (11,)), min(3, head.depths), {}
    drafts_Tk, log_q_Tk = head.propose(batch, k)
    chain = static_tree(recorded(head.levels(batch), rows), chain_paths(k))
    assert chain.tokens == drafts_Tk[-2].tolist() and chain.parents == list(range(-1, k - 1))
    top = [rows[tuple(chain.tokens[:i])].max() for i in range(k)]
    torch.testing.assert_close(torch.stack(top), log_q_Tk[-2])
    rows = {}
    dynamic_tree(recorded(head.levels(batch), rows), 20, 4, k)
    assert k == 1 or max(map(len, rows)) == k - 1
    for path, log_q_V in rows.items():
        torch.testing.assert_close(log_q_V, grown_alone(head.levels(batch), path))


def test_a_tree_grows_the_same_by_the_dense_attention_of_other_devices(monkeypatch):
    head, trees = ready(head_confs()["eagle3"]), []
    for attention in (causal_diagonal, causal_diagonal_dense):
        monkeypatch.setattr("heads.layers.causal_diagonal", attention)
        trees.append(dynamic_tree(head.levels(batch_of(head, (11,))), 20, 4, 4))
    assert trees[0] == trees[1]


def test_the_last_tokens_states_are_not_read():
    for name in STEPWISE:
        head = ready(head_confs()[name])
        batch = batch_of(head, (11,))
        before = next(head.levels(batch))
        for states in (batch.taps_TLD, batch.last_TD):
            if states is not None:
                states[-1] = 1e3
        torch.testing.assert_close(next(head.levels(batch)), before, rtol=0, atol=0)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Reference:
    return Reference(build_tiny(tmp_path_factory.mktemp("tree") / "target"))


PROMPTS = [[5, 9, 300], [17, 4, 4, 250, 80], [400], [33, 34, 35, 36, 37, 38, 39, 40]]
LIMIT = 24


def greedy_text(target: Reference, prompt: list[int], limit: int = LIMIT) -> list[int]:
    """Plain greedy decoding, the whole text read again for every token, without a cache or a mask of ours."""
    text = list(prompt)
    for _ in range(limit):
        last_D = target.forward.decoder(torch.tensor([text])).last_hidden_state[0, -1]
        text.append(int((target.lm_head_VD @ last_D).argmax()))
    return text[len(prompt) :]


def random_tree(rng: random.Random, truth: list[int], nodes: int) -> Tree:
    """Of any shape, with the target's own continuation on one of its paths as far as luck has it."""
    tokens, parents, on_truth = [], [], {-1: 0}
    for node in range(nodes):
        parent = rng.randrange(-1, node)
        depth = on_truth.get(parent)
        token = rng.randrange(512)
        if depth is not None and depth < len(truth) and rng.random() < 0.6:
            token = truth[depth]
        siblings = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
        if token in siblings:
            token = next(t for t in range(512) if t not in siblings)
        if depth is not None and depth < len(truth) and token == truth[depth]:
            on_truth[node] = depth + 1
        tokens.append(token), parents.append(parent)
    return Tree(tokens, parents)


@pytest.mark.parametrize("nodes", [0, 1, 7, 40])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_trees_of_any_shape_leave_the_greedy_text_as_it_is(target, prompt, nodes):
    """Many of their paths are accepted deep, so that whatever a rejected branch left in the cache would show."""
    truth, rng = greedy_text(target, prompt, LIMIT + 40), random.Random(nodes)
    reader, text, accepted = Reader(target), [], 0

    def grow(_):
        return random_tree(rng, truth[len(text) :], nodes)

    def verify(tree, logits):
        path, token = greedily(tree, logits)
        text.extend([*(tree.tokens[node] for node in path), token])
        return path, token

    answer = decode(reader, lambda *_: None, grow, verify, prompt, LIMIT, [])
    assert answer.token_ids == truth[:LIMIT]
    assert answer.nodes == nodes * len(answer.paths)
    accepted = sum(map(len, answer.paths))
    assert 1 + len(answer.paths) + accepted == len(text) >= LIMIT
    assert nodes < 7 or accepted > LIMIT / 3


def test_an_answer_ends_at_a_stop_token_and_the_last_pass_counts_whole(target):
    prompt = PROMPTS[1]
    truth = greedy_text(target, prompt)
    stop = truth[5]
    end = truth.index(stop) + 1
    answer = decode(Reader(target), lambda *_: None, lambda _: Tree(truth[1:9], list(range(-1, 7))), greedily, prompt, LIMIT, [stop])
    assert answer.token_ids == truth[:end]
    assert len(answer.paths) == (end > 1) and sum(map(len, answer.paths)) == 8 * (end > 1)


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_early_exit_drafts_what_the_first_layers_say(target, exit_layer):
    """Exiting after the last layer is the target itself: all is accepted."""
    reader, drafter = Reader(target), Reader(target, exit_layer=exit_layer)
    for prompt in PROMPTS:
        answer = decode(reader, drafter.levels, partial(static_tree, paths=chain_paths(3)), greedily, prompt, LIMIT, [])
        assert answer.token_ids == greedy_text(target, prompt)
        if exit_layer == 2:
            assert all(len(path) == 3 for path in answer.paths)
    body = target.forward.decoder
    hidden = body(torch.tensor([PROMPTS[3]]), output_hidden_states=True).hidden_states[1]
    expected = (body.norm(hidden[0, -1]) @ target.lm_head_VD.T).log_softmax(-1)
    found = next(Reader(target, exit_layer=1).levels(PROMPTS[3], None))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_language_model_grows_a_tree_as_it_grows_each_path(target):
    drafter, rows = Reader(target, exit_layer=1), {}
    dynamic_tree(recorded(drafter.levels(PROMPTS[1], None), rows), 12, 3, 4)
    assert len(rows) == 1 + 3 * 3
    for path, log_q_V in rows.items():
        alone = grown_alone(Reader(target, exit_layer=1).levels(PROMPTS[1], None), path)
        torch.testing.assert_close(log_q_V, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["eagle3", "mtp", "medusa", "hydra"])
def test_heads_draft_trees_from_the_states_of_verification_and_are_lossless(target, name):
    """The states that each pass hands on are those of the whole text read at once."""
    conf = head_confs()[name]
    torch.manual_seed(0)
    head = build(conf | ({"taps": [0, 1, 2]} if conf.get("taps") else {}), spec(target.folder))
    if head.draft_vocab_size is not None:
        head.set_draft_vocab(torch.arange(3, 403, 400 // head.draft_vocab_size)[: head.draft_vocab_size])
    head.attach(frozen(target.folder, torch.float32, "cpu"))
    reader, seen = Reader(target, head.taps), []

    def drafter(text, states):
        seen[:] = [text, states]
        return of_head(head, text, states)

    for grow in (partial(dynamic_tree, nodes=8, width=4, depth=3), partial(static_tree, paths=comb_paths(3, 2))):
        answer = decode(reader, drafter, grow, greedily, PROMPTS[1], LIMIT, [])
        assert answer.token_ids == greedy_text(target, PROMPTS[1]) and answer.nodes > 5 * len(answer.paths)
        text, states = seen
        streams_TLD, last_TD = target.states(torch.tensor(text[:-1]))
        torch.testing.assert_close(states.last_TD, last_TD, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(states.taps_TLD, streams_TLD[:, list(head.taps)], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rule", [rejection_sample, block_verify])
def test_sampled_chains_run_and_an_exact_drafter_is_always_kept(target, rule):
    generator = torch.Generator().manual_seed(0)
    grow, verify = partial(sampled_chain, k=3, generator=generator), partial(sampled, rule, generator)
    reader, whole, half = Reader(target), Reader(target, exit_layer=2), Reader(target, exit_layer=1)
    exact = decode(reader, whole.levels, grow, verify, PROMPTS[0], LIMIT, [])
    assert all(len(path) == 3 for path in exact.paths)
    some = decode(reader, half.levels, grow, verify, PROMPTS[0], LIMIT, [])
    plain = decode(reader, half.levels, no_drafts, verify, PROMPTS[0], LIMIT, [])
    assert len(some.token_ids) == len(plain.token_ids) == LIMIT and plain.nodes == 0 and some.nodes == 3 * len(some.paths)
