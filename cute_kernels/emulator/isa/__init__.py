"""PTX: `ptx/` decodes its text and checks it, `instructions/` says what each instruction does."""
