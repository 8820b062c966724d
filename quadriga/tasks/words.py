"""The closed vocabulary of the tasks: one token per entry (see `quadriga.training.tokenizer`)."""


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _split(
    """cat dog fox bird fish horse cow sheep goat duck hen pig bear wolf deer mouse frog bee ant owl
    tree leaf rose grass stone sand river hill rain snow wind cloud star moon sun fire
    book pen cup plate knife fork spoon chair table lamp door window bed clock phone box bag key
    coin ring hat coat shoe shirt sock belt rope nail drum bell flute violin piano
    apple pear plum lemon peach grape bread cheese milk honey salt sugar rice bean soup cake
    car bus train boat plane bike truck road bridge tower wall roof garden farm ship sail
    king queen child baker doctor teacher driver pilot farmer singer
    hand foot eye ear nose arm leg head heart"""
)
ADJECTIVES = _split(
    """red blue green black white brown yellow big small old new tall short warm cold dark bright
    happy quiet loud fast slow soft"""
)
WORDS = NOUNS + ADJECTIVES

HEROES = _split(
    """Anna Ben Clara David Emma Felix Greta Henry Ida Jack Karl Lena Mia Nora Oscar Paula Ruth
    Simon Tom Vera"""
)
FRIENDS = _split("cat dog fox bird horse sheep goat duck bear wolf deer mouse frog owl")
# Where a story may go, and what is done there.
DEEDS: dict[str, str] = {
    "lake": "swam",
    "forest": "hid",
    "market": "shopped",
    "school": "read",
    "kitchen": "cooked",
    "meadow": "danced",
    "mountain": "climbed",
    "beach": "slept",
    "library": "whispered",
    "harbour": "fished",
}
PLACES = tuple(DEEDS)

NUMBERS = tuple(str(value) for value in range(100))
# Every other word a prompt or an answer may hold.
GLUE = _split(
    """Count Counting Repeat Repeating Copy Copied Reverse Reversed Sort Sorted Result Add Adding
    Double Take Tell Please Day There The Write
    from to down times left list the a in order words numbers each is and write carry total with
    went story of days about short long very medium end one item items times"""
)
