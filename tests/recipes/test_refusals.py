"""What a recipe may not say: each refusal names the key, its value, and what is allowed, with the nearest match."""

import pytest

from trimtab.errors import TrimtabError
from trimtab.recipe import load_recipe
from trimtab.recipe.load import build_recipe, find, parse

IMPORTANCE = "objective.weights=[{name: importance}]"
KL = "objective.penalties=[{name: kl, coefficient: 0.1}]"


def refusal(*overrides, name="dapo") -> str:
    """The lines of the refusal, without the first, which names the recipe."""
    with pytest.raises(TrimtabError) as caught:
        load_recipe(name, overrides)
    first, _, rest = str(caught.value).partition("\n")
    assert first == f"recipe {name}:"
    assert "pydantic" not in rest and "Input should" not in rest
    return "\n".join(line.removeprefix("  ") for line in rest.splitlines())


@pytest.mark.parametrize(
    ("override", "where", "key", "nearest"),
    [
        ("objectve={}", "", "objectve", "objective"),
        ("Model=x", "", "Model", "model"),
        ("data.trian=x", "data: ", "trian", "train"),
        ("reference.arxv=x", "reference: ", "arxv", "arxiv"),
        ("reward.overlong.bufer=1", "reward.overlong: ", "bufer", "buffer"),
        ("reward.0.wieght=1", "reward.math: ", "wieght", "weight"),
        ("advantage.bseline=mean", "advantage: ", "bseline", "baseline"),
        ("objective.old_logprob=bypass", "objective: ", "old_logprob", "old_log_prob"),
        ("objective.surrogate.clip_hihg=0.3", "objective.surrogate: ", "clip_hihg", "clip_high"),
        ("objective.weights=[{name: importance, hihg: 2}]", "objective.weights.importance: ", "hihg", "high"),
        ("objective.penalties=[{name: kl, estimatr: k3}]", "objective.penalties.kl: ", "estimatr", "estimator"),
        ("objective.aggregation.mdoe=token-mean", "objective.aggregation: ", "mdoe", "mode"),
        ("rollout.groupsize=8", "rollout: ", "groupsize", "group_size"),
        ("sampling.dynamc={}", "sampling: ", "dynamc", "dynamic"),
        ("sampling.dynamic.max_batch=3", "sampling.dynamic: ", "max_batch", "max_batches"),
        ("training.minibatch_size=3", "training: ", "minibatch_size", "mini_batch_size"),
        ("optimizer.learning_rte=3", "optimizer: ", "learning_rte", None),
        ("moe.routing=none", "moe: ", "routing", "routing_replay"),
        ("precision.lmhead=fp32", "precision: ", "lmhead", "lm_head"),
    ],
)
def test_a_misspelt_key_at_any_depth(override, where, key, nearest):
    message = refusal(override)
    hint = f"; did you mean {nearest}? Allowed: " if nearest else "; allowed: "
    assert message.startswith(f"{where}unknown key {key!r}{hint}")
    assert nearest is None or f" {nearest}" in message.partition("llowed:")[2]


def test_a_key_of_another_method_is_refused():
    assert "unknown key 'buffer'" in refusal("reward.math.buffer=3")
    assert "unknown key 'mean'" in refusal("objective.weights=[{name: importance, mean: 1}]")  # the adapter's, no key
    assert "unknown key 'coefficient'" in refusal("objective.weights=[{name: importance, coefficient: 1}]")


def test_every_unknown_key_is_named_at_once():
    message = refusal("optimizer.x=1", "optimizer.y=2", "data.z=3")
    assert all(f"unknown key {key!r}" in message for key in "xyz")


@pytest.mark.parametrize(
    ("override", "path", "nearest"),
    [
        ("advantage.name=grop", "advantage.name", None),
        ("advantage.baseline=men", "advantage.baseline", "mean"),
        ("advantage.scale=groupstd", "advantage.scale", "group_std"),
        ("objective.old_log_prob=recompte", "objective.old_log_prob", "recompute"),
        ("objective.surrogate.name=ppoclip", "objective.surrogate.name", "ppo_clip"),
        ("objective.weights=[{name: importnce}]", "objective.weights.importnce.name", "importance"),
        ("objective.weights=[{name: importance, level: tokn}]", "objective.weights.importance.level", "token"),
        ("objective.weights=[{name: importance, bound: trunc}]", "objective.weights.importance.bound", "truncate"),
        ("objective.penalties=[{name: KL, coefficient: 1}]", "objective.penalties.KL.name", "kl"),
        ("objective.penalties=[{name: kl, coefficient: 1, estimator: K3}]", "objective.penalties.kl.estimator", "k3"),
        ("objective.aggregation.mode=token_mean", "objective.aggregation.mode", "token-mean"),
        ("objective.aggregation.denominator=keep", "objective.aggregation.denominator", "kept"),
        ("rollout.engine=vlm", "rollout.engine", "vllm"),
        ("sampling.dynamic.metric=accurcy", "sampling.dynamic.metric", "accuracy"),
        ("optimizer.name=AdamW", "optimizer.name", "adamw"),
        ("moe.routing_replay=R3", "moe.routing_replay", None),
        ("precision.train=bf-16", "precision.train", "bf16"),
        ("precision.rollout=fp8", "precision.rollout", None),
        ("precision.lm_head=fp23", "precision.lm_head", "fp32"),
        ("precision.kv_cache=atuo", "precision.kv_cache", "auto"),
        ("sources.model=papr", "sources.model", "paper"),
    ],
)
def test_a_misspelt_value_of_each_choice(override, path, nearest):
    message = refusal(override)
    value = override.rpartition("=")[2] if "{" not in override else path_value(override, path)
    assert message.startswith(f"{path}: {value!r} is not allowed; ")
    if nearest:
        assert f"did you mean {nearest}?" in message
        assert nearest in message.partition("Allowed: ")[2].split(", ")


def path_value(override, path):
    key = path.rpartition(".")[2]
    return override.partition(f"{key}: ")[2].partition("}")[0].partition(",")[0]


def test_a_misspelt_reward():
    assert refusal("reward.0.name=mth") == (
        "reward.mth.name: 'mth' is not allowed; did you mean math? Allowed: math, exact, overlong"
    )
    assert refusal("reward.0.name=[1]").startswith("reward.0.name: [1] is not allowed; allowed: math")
    assert refusal("reward=[{}]") == "reward.0.name: must be given"


def test_a_method_without_a_key_that_has_no_default():
    assert refusal("objective.masks=[{name: rejection}]") == "objective.masks.rejection.statistic: must be given"


@pytest.mark.parametrize(
    ("override", "bound"),
    [
        ("rollout.group_size=1", "at least 2"),
        ("rollout.group_size=0", "at least 2"),
        ("rollout.prompts_per_step=0", "at least 1"),
        ("rollout.max_length=0", "at least 1"),
        ("rollout.temperature=0", "above 0.0"),
        ("rollout.temperature=-1", "above 0.0"),
        ("rollout.top_p=0", "above 0.0"),
        ("rollout.top_p=1.01", "at most 1.0"),
        ("training.steps=0", "at least 1"),
        ("training.epochs_per_rollout=0", "at least 1"),
        ("training.mini_batch_size=-512", "at least 1"),
        ("training.micro_batch_size=0", "at least 1"),
        ("training.checkpoint_every=0", "at least 1"),
        ("training.seed=-1", "at least 0"),
        ("training.seed=4294967296", "below 4294967296"),
        ("data.max_prompt_length=0", "at least 1"),
        ("optimizer.lr=0", "above 0.0"),
        ("optimizer.weight_decay=-0.1", "at least 0.0"),
        ("optimizer.warmup_steps=-1", "at least 0"),
        ("optimizer.max_grad_norm=0", "above 0.0"),
        ("advantage.eps=-1e-6", "at least 0.0"),
        ("reward.overlong.max_length=0", "at least 1"),
        ("reward.overlong.buffer=-1", "at least 0"),
        ("sampling.dynamic.max_batches=0", "at least 1"),
        ("objective.aggregation.max_length=0", "at least 1"),
    ],
)
def test_a_value_out_of_bounds(override, bound):
    path, _, value = override.partition("=")
    message = refusal(override)
    assert message.startswith(f"{path}: ") and message.endswith(f" is not allowed; it must be {bound}")
    assert float(message.split()[1]) == float(value)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("objective.surrogate.clip_low=1.5", ("clip_low: 1.5", "between 0 and 1")),
        ("objective.surrogate.clip_low=-0.1", ("clip_low: -0.1", "between 0 and 1")),
        ("objective.surrogate.clip_high=-0.1", ("clip_high: -0.1",)),
        ("objective.surrogate.dual_clip=1", ("dual_clip: 1", "above 1")),
        ("objective.weights=[{name: importance, high: 0}]", ("high: 0", "above 0")),
        ("objective.weights=[{name: importance, low: 3, high: 2}]", ("low: 3", "above high: 2")),
        ("objective.penalties=[{name: kl, coefficient: -1}]", ("coefficient: -1", "above 0")),
        ("objective.penalties=[{name: kl, coefficient: 0}]", ("coefficient: 0", "above 0")),
    ],
)
def test_a_value_beyond_the_bounds_of_its_core(override, parts):
    message = refusal(override)
    assert message.startswith("objective: ") and all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("training.steps=3.0", "a whole number"),
        ("training.steps='3'", "a whole number"),
        ("training.steps=true", "a whole number"),
        ("training.steps=.nan", "a whole number"),
        ("training.steps=null", "a whole number"),
        ("rollout.group_size=[8]", "a whole number"),
        ("optimizer.lr=true", "a number"),
        ("optimizer.lr='1e-6'", "a number"),
        ("optimizer.lr=1e-6x", "a number"),
        ("optimizer.lr=.nan", "a finite number"),
        ("optimizer.lr=.inf", "a finite number"),
        ("optimizer.lr=1e999", "a finite number"),
        ("optimizer.weight_decay=.inf", "a finite number"),
        ("reward.math.weight=.nan", "a finite number"),
        ("reward.math.weight=-.inf", "a finite number"),
        ("objective.surrogate.clip_low=.nan", "a finite number"),
        ("objective.surrogate.clip_high=.inf", "a finite number"),
        ("objective.surrogate.clip_high=false", "a number"),
        ("objective.surrogate.dual_clip='3'", "a number"),
        ("training.shuffle_rewards=1", "true or false"),
        ("training.shuffle_rewards='yes'", "true or false"),
        ("model=3", "text"),
        ("model=null", "text"),
        ("data.prompt=on", "text"),  # YAML 1.1 reads `on` as true
        ("reference.arxiv=2503.14476", "text"),  # a number would lose the zeros at its end
        ("data=x", "a mapping of keys"),
        ("rollout=null", "a mapping of keys"),
        ("schedules=3", "a mapping of keys"),
        ("objective.surrogate=ppo_clip", "a mapping of keys"),
        ("reward=math", "a list"),
        ("reward={name: math}", "a list"),
        ("objective.weights={name: importance}", "a list"),
        ("sampling.curriculum=easy", "null"),
    ],
)
def test_a_value_of_the_wrong_type(override, what):
    path = override.partition("=")[0]
    message = refusal(override)
    assert message.startswith(f"{path}: ") and message.endswith(f" is not allowed; it must be {what}"), message


def test_true_is_no_number_in_a_method():
    message = refusal("objective.weights=[{name: importance, normalize: 1, high: true}]")
    assert "objective.weights.importance.normalize: 1 is not allowed; it must be true or false" in message
    assert "objective.weights.importance.high: True is not allowed; it must be a number" in message


@pytest.mark.parametrize(
    "path",
    ["name", "model", "data", "reward", "objective", "rollout", "training", "optimizer", "data.train", "optimizer.lr"]
    + ["objective.surrogate", "objective.aggregation", "objective.aggregation.mode", "rollout.group_size"]
    + ["rollout.prompts_per_step", "rollout.max_length", "training.mini_batch_size", "training.steps"],
)
def test_a_required_key_that_is_missing(path):
    tree = parse(find("quickstart"))
    *parents, last = path.split(".")
    node = tree
    for key in parents:
        node = node[key]
    del node[last]
    with pytest.raises(TrimtabError, match=rf"^recipe mine:\n  {path}: must be given$"):
        build_recipe(tree, source="mine")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective.penalties=[{name: kl}]", "objective.penalties.kl.coefficient: must be given"),
        ("reward=[{name: overlong, buffer: 1}]", "reward.overlong.max_length: must be given"),
        ("objective.surrogate={}", "objective.surrogate.name: must be given"),
        ("objective.surrogate={clip_low: 0.1}", "objective.surrogate.name: must be given"),
        ("reward=[]", "reward: at least 1 must be given"),
        ("reward=[math]", "reward.0: 'math' is not allowed; it must be a mapping of keys"),
    ],
)
def test_a_method_that_is_incomplete(override, message):
    assert refusal(override) == message


@pytest.mark.parametrize("value", ["''", "../x", "a/b", ".hidden", "'a b'"])
def test_a_name_that_cannot_name_a_folder(value):
    assert refusal(f"name={value}").startswith("name: ")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["training.mini_batch_size=100"], ["training.mini_batch_size: 100", "8192 answers", "512 x", "16"]),
        (["rollout.prompts_per_step=1"], ["training.mini_batch_size: 512 must divide the 16 answers"]),
        (["training.micro_batch_size=100"], ["training.micro_batch_size: 100", "mini_batch_size 512"]),
        (["objective.aggregation.mode=seq-mean-token-sum-norm"], ["seq-mean-token-sum-norm needs max_length"]),
        (["objective.old_log_prob=bypass", IMPORTANCE], ["old/rollout", "weights/importance", "bypass"]),
        (
            ["objective.weights=[{name: importance}, {name: importance, level: sequence_product}]"],
            ["weights/importance_2 counts old/rollout, which weights/importance counts already"],
        ),
        (["reward.overlong.buffer=20481"], ["reward.overlong: buffer 20481 is longer than max_length 20480"]),
        (["schedules={optimizer.lr: {name: cosine}}"], ["optimizer.lr: no schedule is available"]),
        (["sources.nothing=paper"], ["sources: 'nothing' is not a key of this recipe"]),
    ],
)
def test_values_that_do_not_fit_together(overrides, parts):
    message = refusal(*overrides)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.aggregation.mode=seq-mean-token-sum-norm", "objective.aggregation.max_length=20480"],
        ["objective.old_log_prob=bypass"],
        [IMPORTANCE, KL],
        ["training.mini_batch_size=8192", "training.micro_batch_size=8192"],
        ["reward.overlong.buffer=20480"],
        ["rollout.group_size=2", "rollout.top_p=1", "optimizer.weight_decay=0", "training.seed=4294967295"],
        ["objective.surrogate.clip_low=0", "objective.surrogate.clip_high=0", "objective.surrogate.dual_clip=1.01"],
    ],
)
def test_the_same_within_bounds_loads(overrides):
    assert load_recipe("dapo", overrides) != load_recipe("dapo")


def test_everything_that_is_wrong_is_said_at_once():
    message = refusal("optimizer.lr=0", "rollout.engine=vlm", "objective.surrogate.clip_hihg=1")
    assert len(message.splitlines()) == 3


def test_a_rejection_that_drops_nothing():
    assert "without low, high or veto" in refusal("objective.masks=[{name: rejection, statistic: token_ratio}]")
    truncated = "objective.weights=[{name: importance, bound: truncate}]"
    assert "nothing here drops any" in refusal(truncated, "objective.aggregation.denominator=kept")
