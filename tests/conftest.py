from hypothesis import settings

# The time of an example says nothing on a busy machine: torch's first calls alone may take half a second.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
