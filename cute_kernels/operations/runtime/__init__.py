"""From a plan and its operands to a launch: on a GPU or in the emulator, and what is kept between launches."""
