"""Tasks: pure functions of (seed, index), answers that a program judges, heavy tails."""

from __future__ import annotations

import itertools
import random
import re
import statistics

import pytest

from quadriga.tasks import (
    DEFAULT_MIX,
    LONG_LENGTHS,
    TASKS,
    LengthMix,
    check,
    make_example,
    make_reworded_example,
    sample_examples,
    size_of,
)


@pytest.mark.parametrize("task", TASKS)
def test_an_example_is_a_pure_function_and_its_answer_is_right(task: str) -> None:
    for index in range(200):
        example = make_example(task, seed=3, index=index)
        assert example == make_example(task, seed=3, index=index)
        assert check(task, example.prompt, example.answer)
        assert "\n" not in example.prompt + example.answer
    assert make_example(task, seed=3, index=0) != make_example(task, seed=4, index=0)


@pytest.mark.parametrize("task", TASKS)
def test_wrong_answers_are_seen(task: str) -> None:
    rng = random.Random(0)
    for index in range(60):
        example = make_example(task, seed=5, index=index)
        words = example.answer.split()
        cut = rng.randrange(len(words))
        assert not check(task, example.prompt, " ".join(words[:cut] + words[cut + 1 :]))
        assert not check(task, example.prompt, f"{example.answer} {words[-1]}")
        assert not check(task, example.prompt, "")


def test_answers_by_hand() -> None:
    assert check("count", "Count from 3 to 6.", "Counting: 3 4 5 6")
    assert check("count", "Count down from 6 to 4.", "Counting: 6 5 4")
    assert check("repeat", "Repeat red fox 2 times.", "Repeating: red fox 1 left, red fox 0 left")
    assert check("copy", "Copy the list: cat 7 dog", "Copied: cat 7 dog")
    assert check("reverse", "Reverse: cat 7 dog", "Reversed: dog 7 cat")
    assert check("sort", "Sort: 11 2 30 2", "Sorted: 2 2 11 30")
    assert check("transform", "Double each: 4 12", "Result: 4 is 8, 12 is 24")
    assert check(
        "add",
        "Add 4 7 and 5 5.",
        "Adding: 7 and 5 and 0 is 12 write 2 carry 1; 4 and 5 and 1 is 10 write 0 carry 1; "
        "total 1 0 2",
    )


def test_a_story_keeps_its_own_rules() -> None:
    prompt = "Tell a story of 2 days about Mia and the fox."
    good = (
        "Day 1: Mia went to the lake. There Mia swam with the fox. "
        "Day 2: Mia went to the school. There Mia read with the fox."
    )
    assert check("story", prompt, good)
    assert not check("story", prompt, good.replace("swam", "read"))  # not done at a lake
    assert not check("story", prompt, good.replace("Day 2", "Day 3"))
    assert not check("story", prompt, good.replace("school", "lake").replace("read", "swam"))
    assert not check("story", prompt.replace("fox", "owl"), good)
    assert not check("story", prompt.replace("2 days", "3 days"), good)
    assert check("story", "Tell a short story about Mia and the fox.", good)
    assert not check("story", "Tell a long story about Mia and the fox.", good)


def test_the_text_of_an_example_ends_its_line() -> None:
    example = make_example("sort", seed=1, index=0)
    assert example.text == example.prompt + "\n"
    assert example.continuation == example.answer


@pytest.mark.parametrize("task", TASKS)
def test_a_reworded_question_has_an_answer_that_the_task_accepts(task: str) -> None:
    for index in range(200):
        example = make_reworded_example(task, seed=3, index=index)
        assert example == make_reworded_example(task, seed=3, index=index)
        assert check(task, example.prompt, example.answer)
        assert check(task, example.prompt, example.continuation)
        assert (example.text + example.continuation).strip().count("\n") <= 2
        assert (example.text + example.continuation).endswith("\n" + example.answer)


def test_reworded_questions_have_the_forms_that_people_type() -> None:
    texts = {make_reworded_example("sort", seed=3, index=i).text for i in range(3000)}
    for form in (
        r"Sort: \d \d \d\n",
        r"Sort: \d \d \d",
        r"sort: [\d ]+",
        r"Sort [\d ]+\.",
        r"Sort: [\d ]+ ",
        r"sort these numbers:? (\d+, )*\d+ and \d+",
        r"Sort \[(\d+, )+\d+\]",
        r"Can you sort (\d+, )+\d+\?",
        r"[Ss]ort:? \d+(,\d+)+",
    ):
        assert any(re.match(form + r"\Z", text) for text in texts), form


def test_a_stream_mixes_reworded_questions_in() -> None:
    plain = list(itertools.islice(sample_examples(seed=9), 400))
    mixed = list(itertools.islice(sample_examples(seed=9, reworded_share=0.25), 400))
    same = sum(one == other for one, other in zip(plain, mixed, strict=True))
    assert 250 < same < 350
    assert all(e.wording for e, other in zip(mixed, plain, strict=True) if e != other)


def test_another_tasks_prompt_has_no_right_answer() -> None:
    for task, other in itertools.permutations(TASKS, 2):
        example = make_example(task, seed=1, index=0)
        assert not check(other, example.prompt, example.answer)


def test_lengths_are_heavy_tailed_and_stay_in_range() -> None:
    rng = random.Random(1)
    sizes = [LengthMix(uniform_share=0.0).sample(rng, 2, 99) for _ in range(4000)]
    assert min(sizes) == 2
    assert max(sizes) <= 99
    assert statistics.median(sizes) < 8
    assert sum(size > 50 for size in sizes) > 40
    assert all(LONG_LENGTHS.sample(rng, 2, 99) >= 50 for _ in range(200))
    assert all(LengthMix(scale=0.2).sample(rng, 2, 32) <= 8 for _ in range(200))


def test_a_stream_can_be_entered_anywhere() -> None:
    whole = list(itertools.islice(sample_examples(seed=9), 30))
    assert list(itertools.islice(sample_examples(seed=9, start=20), 10)) == whole[20:]
    assert {example.task for example in whole} <= set(DEFAULT_MIX)


def test_sizes_are_public() -> None:
    assert all(low < high for low, high in map(size_of, TASKS))
