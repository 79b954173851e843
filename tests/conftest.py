"""What all tests share."""

from hypothesis import settings

# time is that of the machine: no claim of these tests
settings.register_profile("gdp", deadline=None)
settings.load_profile("gdp")
