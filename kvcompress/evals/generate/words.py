"""Plain English words from which the names of needles are made."""

ADJECTIVES = (
    "amber", "ancient", "bitter", "bold", "brave", "bright", "calm", "careful", "cheerful", "clever", "cold",
    "cosy", "curious", "distant", "dusty", "eager", "early", "faint", "fearless", "gentle", "golden", "happy",
    "heavy", "hidden", "humble", "icy", "jolly", "kind", "lively", "lonely", "loyal", "mellow", "misty", "noble",
    "patient", "polite", "proud", "quiet", "rapid", "restless", "rusty", "sandy", "shiny", "silent", "silver",
    "simple", "sleepy", "smooth", "steady", "stormy", "sturdy", "sunny", "swift", "tender", "thirsty", "tidy",
    "velvet", "vivid", "warm", "wooden",
)  # fmt: skip

NOUNS = (
    "acorn", "anchor", "badger", "basket", "beacon", "bridge", "candle", "canyon", "carpet", "castle", "cherry",
    "cloud", "cottage", "desert", "dolphin", "eagle", "ember", "falcon", "feather", "forest", "fountain", "garden",
    "glacier", "hammer", "harbour", "hedgehog", "island", "ivory", "jacket", "kettle", "ladder", "lantern",
    "lemon", "lighthouse", "maple", "meadow", "mirror", "mountain", "needlework", "ocean", "orchard", "otter",
    "pebble", "pepper", "pillow", "pocket", "quarry", "rabbit", "ribbon", "river", "saddle", "shadow", "sparrow",
    "teapot", "thunder", "tunnel", "turtle", "valley", "violin", "walnut",
)  # fmt: skip
