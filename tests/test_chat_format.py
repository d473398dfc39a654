"""One chat format everywhere (TRAPS 28, 29): the same prompt tokens in regeneration, training and evaluation, with
thinking on and off; recorded with answers and drafters, and a difference is refused or said."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from data import dataset, make_features, regenerate
from data.answers import check_origin, read_manifest, read_rows
from data.chat import (
    PLAIN,
    ChatFormat,
    date_warning,
    encode_prompt,
    messages_of,
    parse_arguments,
    template_fingerprint,
)
from data.feature_cache import FeatureCache, cache_settings
from data.settings import RunConfig, load_config
from eval.chat_format import compare_formats, trained_format, warning
from eval.report import collect_settings
from eval.session import Session, load_session
from mistakes import mistake
from models.target import load_target
from tiny import tiny_drafter
from tiny_tokenizer import TEMPLATE, save_tiny_target, tiny_tokenizer
from training import train_drafter
from training.plan import prepare
from training.session import described
from training_runs import OPTIONS

DATED = TEMPLATE.replace("{% for m in messages %}", "{{ date | default('') }}{% for m in messages %}", 1)
PROMPTS = [["hi there."], ["count to three."], ["why?", "and then?"]]
FORMATS = {
    "thinking off": {},
    "thinking on": {"thinking": True},
    "arguments": {"template_args": ["date=monday,"]},
}


@pytest.fixture(autouse=True)
def _keep_environment(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Config of an answered run in each format; the targets are one."""
    folder = tmp_path_factory.mktemp("formats")
    target = save_tiny_target(folder / "target", template=DATED)
    asked = folder / "asked.jsonl"
    asked.write_text("".join(json.dumps({"id": f"p{n}", "turns": turns}) + "\n" for n, turns in enumerate(PROMPTS)))
    found = {}
    for name, options in FORMATS.items():
        run = folder / name.replace(" ", "-")
        common = OPTIONS | {"target": target, "prompts": [str(asked)], "max_answer_length": 6, "num_prompts": 3}
        config = folder / f"{run.name}.yaml"
        config.write_text(yaml.safe_dump(common | {"run_dir": str(run), "keep_features": False, **options}))
        assert regenerate.main([str(config)]) == 0
        found[name] = config
    return found


def rows_of(config):
    return read_rows(config.path("answers"))


@pytest.mark.parametrize("name", FORMATS)
def test_prompt_ids_are_the_same_in_regeneration_training_and_evaluation(runs, name):
    config = load_config(str(runs[name]))
    rows = rows_of(config)
    assert sorted(rows) == ["p0", "p1", "p2", "p2.turn2"]

    plan = prepare(config)
    trained = {}
    for index in range(len(plan.data)):
        sample = plan.data[index]
        trained[sample.id] = sample.tokens_S[~sample.supervised_S].tolist()

    session = Session(config, plan.target, tiny_drafter(plan.target), "")
    tokenizer, evaluated = plan.target.tokenizer, {}
    for number, turns in enumerate(PROMPTS):
        texts = []
        for turn in range(len(turns)):
            key = f"p{number}" + (f".turn{turn + 1}" if turn else "")
            evaluated[key] = session.usable_ids(turns[: turn + 1], texts)
            texts.append(tokenizer.decode(rows[key].answer_ids, skip_special_tokens=True))

    assert evaluated == {key: row.prompt_ids for key, row in rows.items()}
    assert trained and trained == {key: evaluated[key] for key in trained}
    # And they are what the format says.
    text = tokenizer.decode(rows["p0"].prompt_ids)
    assert text == {"thinking off": "", "thinking on": "", "arguments": "monday,"}[name] + "u:hi there./a:" + (
        "think." if name == "thinking on" else ""
    )


def test_answers_say_their_format_and_no_other_is_mixed_in(runs, capsys):
    settings = {
        name: read_manifest(load_config(str(config)).path("answers"))["settings"] for name, config in runs.items()
    }
    assert (settings["thinking on"]["thinking"], settings["thinking on"]["template_args"]) == (True, {})
    assert settings["arguments"]["template_args"] == {"date": "monday,"}
    assert len({s["template"] for s in settings.values()}) == 3
    line = mistake(
        capsys, regenerate.main, "regenerate", runs["thinking on"], "--thinking", "false", "--num_prompts", "2"
    )
    assert "answers made with" in line


def test_a_data_set_of_the_targets_own_answers_says_format_and_full_agreement(runs):
    """The whole way: prompts, regeneration, data set; every label is the target's argmax (TRAPS 31)."""
    config = load_config(str(runs["thinking on"]))
    assert dataset.main([str(runs["thinking on"]), "--agreement_rows", "4"]) == 0
    report = json.loads(Path(config.path("dataset", "report.json")).read_text())
    labels = sum(len(row.answer_ids) for row in rows_of(config).values())
    assert report["agreement"] == {"rows": 4, "labels": labels, "equal": labels}
    assert (report["rows"], report["conversations"], report["tokenised_again"]) == (4, 3, 0)
    assert "- thinking: on\n" in Path(config.path("dataset", "README.md")).read_text()
    line = Path(config.path("dataset", "report.md")).read_text()
    assert f"| labels equal to the target's argmax ({labels} of 4 answers) | 100.0% |" in line


def test_answers_of_before_there_were_formats_were_plain(runs):
    """Their manifests name no thinking and no arguments; the template's hash is that of the plain format."""
    config = load_config(str(runs["thinking off"]))
    manifest = read_manifest(config.path("answers"))
    for name in PLAIN.recorded:
        del manifest["settings"][name]
    now = {"target_identity": None, "template": manifest["settings"]["template"], "quantization": "none"}
    check_origin(manifest, now, "answers", PLAIN)
    with pytest.raises(ValueError, match="are those of chat template"):
        check_origin(manifest, now | {"template": "another"}, "answers", ChatFormat(True))


@pytest.mark.parametrize(
    "name, words, message",
    [
        ("thinking on", ["--thinking", "false"], "asked with thinking True, this run has False: set thinking as"),
        ("thinking off", ["--thinking"], "asked with thinking False, this run has True"),
        ("arguments", ["--template_args", "date=friday,"],
         "asked with template_args {'date': 'monday,'}, this run has {'date': 'friday,'}"),
    ],
)  # fmt: skip
def test_training_and_features_refuse_answers_of_another_format_and_name_it(runs, capsys, name, words, message):
    assert message in mistake(capsys, train_drafter.main, "train", runs[name], *words)
    assert message in mistake(capsys, make_features.main, "features", runs[name], *words)


def test_a_changed_template_is_another_cache_and_refuses_the_answers(runs, tmp_path, capsys):
    """TRAPS 29: nothing that was tokenised before is used."""
    config = load_config(str(runs["thinking off"]))
    target = load_target(config.target, torch.float32)
    before = cache_settings(target, config.target, [0, 2])
    FeatureCache(str(tmp_path / "cache"), before, 640, writing=True)
    target.tokenizer.chat_template += " "
    after = cache_settings(target, config.target, [0, 2])
    assert before["template"] != after["template"]
    with pytest.raises(ValueError, match="was made with template"):
        FeatureCache(str(tmp_path / "cache"), after, 640)
    with pytest.raises(ValueError, match="was made with template"):
        other = cache_settings(load_target(config.target, torch.float32), config.target, [0, 2], form=ChatFormat(True))
        FeatureCache(str(tmp_path / "cache"), other, 640)
    changed = tmp_path / "target"
    shutil.copytree(config.target, changed)
    template = changed / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    line = mistake(capsys, train_drafter.main, "train", runs["thinking off"], "--target", str(changed))
    assert "are those of chat template" in line
    line = mistake(capsys, regenerate.main, "regenerate", runs["thinking off"], "--target", str(changed))
    assert "answers made with template" in line


def test_a_drafters_provenance_carries_the_format(runs):
    plan = prepare(load_config(str(runs["arguments"])))
    found = described(plan)["chat_format"]
    template = template_fingerprint(plan.target.tokenizer, ChatFormat(False, {"date": "monday,"}))
    assert found == {"thinking": False, "template_args": {"date": "monday,"}, "template": template}
    json.dumps(found)


def drafter_of(runs, folder, chat_format):
    """Config of an evaluation with thinking off, and a drafter whose training says so or otherwise."""
    config = load_config(str(runs["thinking off"]))
    tiny_drafter(load_target(config.target, torch.float32)).model.save_pretrained(folder)
    (folder / "provenance.json").write_text(json.dumps({"chat_format": chat_format} if chat_format else {"step": 1}))
    return config


def test_a_drafter_of_another_format_is_said_in_one_line_and_in_the_settings(runs, tmp_path, capsys):
    on = {"thinking": True, "template_args": {}, "template": "abc"}
    config = drafter_of(runs, tmp_path, on)
    session = load_session(config, str(tmp_path))
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert lines == [
        "warning: the drafter was trained in another chat format (thinking True, here False): "
        "expect fewer accepted tokens"
    ]
    settings = collect_settings(config, session.target, session.drafter, str(tmp_path))
    assert settings["chat_format"] == {
        "template": template_fingerprint(session.target.tokenizer),
        "drafter": on,
        "equal": False,
    }
    assert settings["thinking"] is False and settings["template_args"] == []


def test_a_drafter_of_the_same_format_is_not_worth_a_line(runs, tmp_path, capsys):
    template = template_fingerprint(tiny_tokenizer(DATED))
    config = drafter_of(runs, tmp_path, {"thinking": False, "template_args": {}, "template": template})
    load_session(config, str(tmp_path))
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "provenance, options, equal, said",
    [
        (None, {}, None, None),
        ({"step": 1}, {}, True, None),  # of before there were formats
        ({"step": 1}, {"thinking": True}, False, "thinking False, here True"),
        ({"chat_format": {"thinking": False, "template_args": {}, "template": "abc"}}, {}, False, "template abc, here"),
        ({"chat_format": {"thinking": False, "template_args": {"a": 1}, "template": "abc"}},
         {"template_args": ["a=2"]}, False, "template_args {'a': 1}, here {'a': 2}"),
    ],
)  # fmt: skip
def test_formats_are_compared(provenance, options, equal, said):
    config, tokenizer = RunConfig(**options), tiny_tokenizer()
    found = compare_formats(config, tokenizer, provenance)
    assert found["equal"] is equal and (found["drafter"] is None) == (provenance is None)
    line = warning(config, tokenizer, provenance)
    assert line is None if said is None else said in line
    assert trained_format(None) is None


@pytest.mark.parametrize(
    "word, value",
    [
        ("date=26 Jul 2024", "26 Jul 2024"),
        ("date=2024-07-26", "2024-07-26"),  # a date of YAML's own would be no JSON
        ("n=3", 3),
        ("x=0.5", 0.5),
        ("on=true", True),
        ("nothing=null", None),
        ("empty=", ""),
        ("quoted='3'", "3"),
        ("many=[1, 2]", "[1, 2]"),
        ("infinite=.inf", ".inf"),
        ("open=[", "["),
        ("equation=a=b", "a=b"),
    ],
)
def test_template_arguments_are_yaml_scalars(word, value):
    (found,) = parse_arguments([word]).values()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "words, message",
    [
        (["date"], "template_args must be KEY=VALUE, got 'date'"),
        (["=3"], "template_args must be KEY=VALUE, got '=3'"),
        (["enable_thinking=true"], "enable_thinking is the option thinking"),
        (["messages=x"], "messages is not for the user to set"),
        (["a=1", "a=2"], "a is given twice"),
    ],
)
def test_bad_template_arguments_are_refused_with_the_options(words, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(template_args=words)


def test_template_arguments_reach_the_template():
    tokenizer, messages = tiny_tokenizer(DATED), messages_of(["hi"], [])
    form = ChatFormat.of(SimpleNamespace(thinking=True, template_args=["date=monday,"]))
    assert tokenizer.decode(encode_prompt(tokenizer, messages, form=form)) == "monday,u:hi/a:think."
    assert template_fingerprint(tokenizer, form) != template_fingerprint(tokenizer, ChatFormat(True))
    assert template_fingerprint(tokenizer, ChatFormat(False)) == template_fingerprint(tokenizer)


def test_a_template_that_writes_todays_date_is_said_unless_it_is_given():
    template = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}" + TEMPLATE
    assert "give --template_args 'date_string=26 Jul 2024'" in date_warning(tiny_tokenizer(template))
    assert date_warning(tiny_tokenizer(template), ChatFormat(False, {"date_string": "26 Jul 2024"})) is None
    assert date_warning(tiny_tokenizer()) is None and date_warning(tiny_tokenizer(None)) is None
