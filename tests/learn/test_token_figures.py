"""Pictures of where rows go draw what the kernels really do, and say it in text."""

import re

from pictures import text_of

from gpuaccel.learn import token_figures

WORDS = "the cat and the dog and the bird".split()


def colours(figure, pattern):
    return re.findall(pattern, figure.drawn)


def test_rows_that_meet_are_counted_and_drawn():
    figure = token_figures.meeting(WORDS)
    assert (
        text_of(figure) == "8 rows of dout go to 5 rows of dwte; 'the' gets 3 of them"
        and figure.drawn.count("<path") == 8
    )


def test_rows_are_counted_and_land_in_their_places_in_order():
    figure = token_figures.counting(WORDS)
    assert text_of(figure) == (
        "counted: and: 2 rows; bird: 1 row; cat: 1 row; dog: 1 row; the: 3 rows; "
        "rows in their places: 2, 5, 7, 1, 4, 0, 3, 6"
    )
    assert re.findall(r">place (\d)<", figure.drawn) == ["0", "2", "3", "4", "5"]
    assert re.findall(r">row (\d)<", figure.drawn) == list("25714036")
    same = token_figures.counting(["a"] * 16)
    assert text_of(same).startswith("counted: a: 16 rows") and ">place 0<" in same.drawn


def test_bits_that_differ_are_counted_and_red():
    figure = token_figures.bits({"one": 1.0, "two": 1.0 + 2**-23})
    assert "1 bit differs (red)" in text_of(figure) and figure.drawn.count(token_figures.RED) == 2
    assert "every bit is the same" in text_of(token_figures.bits({"one": 0.1, "two": 0.1}))
    assert "bits differ" in text_of(token_figures.bits({"a": 1.0, "b": float("nan")}))


def test_random_bits_carry_where_the_sum_of_the_lower_halves_is_65536_or_more():
    figure = token_figures.carry(256.25, [50_000, 57_343, 57_344])
    assert text_of(figure) == (
        "256.25, lower half 8,192: with 50,000, which does not carry, 256; "
        "with 57,343, which does not carry, 256; with 57,344, which carries, 258"
    )
    # 16 bits and the words are red where it carries
    assert figure.drawn.count(token_figures.RED) == 17
    assert "8,192 + 57,344 = 65,536: carries 1" in figure.drawn
    exact = text_of(token_figures.carry(258.0, [65_535]))
    assert exact == "258, lower half 0: with 65,535, which does not carry, 258"
