/*
 * The command line: what its files share.
 *
 * A command is one file, cmd_NAME.c, that ends in a cli_command; main.c lists them. arguments.c turns the words of the
 * command line into a cli_call by the command's flags and the library's table of options, so that an option added there
 * is a flag here. Commands use the library's public headers only, print through output.c and return an exit code.
 */
#ifndef CLI_H
#define CLI_H

#include <cairn/cairn.h>
#include <jansson.h>

typedef enum cli_exit {
    CLI_FOUND = 0,     /* found, valid */
    CLI_NOT_FOUND = 1, /* infeasible, unknown, invalid schedule */
    CLI_BAD_INPUT = 2, /* usage or bad input */
    CLI_INTERNAL = 3,
    CLI_INTERRUPTED = 130
} cli_exit;

/* ---- commands ---- */

/** What flags a command takes, in groups. */
typedef enum cli_flags {
    CLI_JSON = 1 << 0,
    CLI_BUDGET = 1 << 1,
    CLI_MACHINE = 1 << 2, /* --host-budget, --to-host, ... */
    CLI_SOLVER = 1 << 3,  /* --solver */
    CLI_SEARCH = 1 << 4,  /* --iterations, --seed: of searches */
    CLI_GOAL = 1 << 5,    /* --minimize, --objective */
    CLI_OUTPUT = 1 << 6,  /* -o */
    CLI_TRACE = 1 << 7,
    CLI_BUDGETS = 1 << 8, /* --budgets, --csv */
    CLI_BATCH = 1 << 9,
    CLI_METHOD = 1 << 10, /* --slots, --segments: how some solvers go about it */
    CLI_LIMITS = 1 << 11, /* --time-limit, --threads, ...: all other options of the library */
} cli_flags;

typedef struct cli_call cli_call;

typedef struct cli_command {
    const char *name;
    const char *operands; /* as in "PROBLEM SCHEDULE" */
    int operands_min, operands_max;
    unsigned flags;     /* cli_flags */
    const char *budget; /* what --budget is where it is not given; NULL = it has to be */
    const char *summary;
    const char *details; /* a paragraph or two for `cairn help NAME` */
    cli_exit (*run)(cli_call *call);
} cli_command;

extern const cli_command *const cli_commands[]; /* ends in NULL */
const cli_command *cli_command_find(const char *name);

/* ---- a call ---- */

enum { CLI_OPERANDS_MAX = 2 };

struct cli_call {
    const cli_command *command; /* NULL while it is not known */
    const char *operands[CLI_OPERANDS_MAX];
    int operand_count;
    bool json, csv, wants_help;
    const char *output, *trace, *budget, *budgets, *batch, *time_limit; /* NULL = not given */
    const char *solver;                                                 /* NULL = not given */
    unsigned given;                                                     /* bit i: cairn_option_at(i) was */
    bool has_machine_flag, minimizes_memory;
    cairn_options *options;
    cairn_problem *problem;
    cairn_schedule *schedule;
};

/** Fills in a call from the words after the command. */
cli_exit cli_parse(cli_call *call, int count, char **words);
/** A flag that --help shows: "--slots N", and what it does. Calls show for each that the command takes. */
void cli_list_flags(const cli_command *command, void (*show)(const char *flag, const char *help));
/** --budget as a number: fallback where it was not given, CAIRN_NONE for "none". */
cli_exit cli_budget(cli_call *call, int64_t fallback, int64_t *budget_bytes);

/* ---- solvers and their options ---- */

/** The solver of that name; NULL where there is none. */
const cairn_solver_info *cli_solver_find(const char *name);
/** Lines that say what the letters in the costs of solvers stand for. */
extern const char cli_symbols[];
/** In which respect a solver's answers are optimal: "among persistent schedules"; "" where in none. */
const char *cli_optimal_text(const cairn_solver_info *solver, char *out, size_t size);
/** Why a solver is not available here, and what to do about it. */
const char *cli_why_absent(const cairn_solver_info *solver, char *out, size_t size);
/** A line with the flags of the options that are a solver's own, after a heading; nothing where it has none. */
void cli_print_options(const char *heading, const char *solver);
/** Tells which of the options that were given changed nothing, for the named solver has no use for them. */
void cli_tell_unused(const cli_call *call);

/* ---- inputs ---- */

/** Reads operand 0 into call->problem. */
cli_exit cli_load_problem(cli_call *call);
/** Reads operands 0 and 1; the machine that the flags ask for becomes the schedule's where it brings none. */
cli_exit cli_load_schedule(cli_call *call);

/* ---- output ---- */

/** Reports a failure of the library, in a file or NULL, on standard error and under --json on standard output. */
cli_exit cli_fail(const cli_call *call, const char *file, const cairn_error *error);
/** The same of what the program itself finds, which has no place in any file. */
cli_exit cli_fail_plainly(const cli_call *call, cairn_status status, const char *message);
/** Reports that a result, of -o or --trace, could not be written. */
cli_exit cli_fail_to_write(const cli_call *call, const char *path, const cairn_error *error);
/** Reports wrong usage. */
cli_exit cli_misuse(const cli_call *call, const char *format, ...) __attribute__((__format__(__printf__, 2, 3)));
/** A line on standard error. */
void cli_note(const char *format, ...) __attribute__((__format__(__printf__, 1, 2)));

/** Refuses outputs that contradict each other, and files that could not be written, before the work begins. */
cli_exit cli_check_outputs(const cli_call *call);
/** Whether standard output belongs to a file given as "-", so that nothing else may be printed there. */
bool cli_stdout_is_taken(const cli_call *call);
/**
 * Writes a result where a flag says. Signals that end the process wait until a file is complete: none leaves a temporary
 * one behind.
 */
cairn_status cli_write_file(const char *path, const char *text, size_t length, cairn_error *error);
/** Writes the timeline of a valid schedule where --trace says; does nothing without it. */
cli_exit cli_write_trace(const cli_call *call, const cairn_schedule *schedule, int64_t budget_bytes);

/** Prints one JSON value and a newline, and frees it; NULL is a failed allocation. */
cli_exit cli_print_json(const cli_call *call, json_t *value);
/** A sink of the library's reports that goes to standard output. */
cairn_sink cli_stdout_sink(void);
/** "label        value   note": a line of a table. note may be NULL. */
void cli_row(const char *label, const char *value, const char *note);
/** Whether all of standard output has arrived; reports it when not. Last call of a run. */
cli_exit cli_close_stdout(cli_exit result);

/* ---- JSON ---- */

/** An object that is filled in member by member; failures of allocation are remembered. */
typedef struct cli_object {
    json_t *object;
    bool failed;
} cli_object;

cli_object cli_object_new(void);
void cli_add(cli_object *out, const char *key, json_t *value);
void cli_add_text(cli_object *out, const char *key, const char *text); /* "" and NULL become null */
void cli_add_int(cli_object *out, const char *key, int64_t value);     /* CAIRN_NONE becomes null */
void cli_add_bool(cli_object *out, const char *key, bool value);
json_t *cli_object_take(cli_object *out);

/** The object of `cairn solve`. */
json_t *cli_info_json(const cairn_info *info);
/** Prints a replay under a budget, or under CAIRN_RECORDED, as verify and simulate do. */
cli_exit cli_print_replay(const cli_call *call, const cairn_replay *replay, int64_t budget_bytes);

/* ---- long runs ---- */

/** An env that stops on Ctrl-C and shows progress on a terminal; in force until cli_watch_end. */
const cairn_env *cli_watch_begin(const char *what);
void cli_watch_end(void);
/** Whether Ctrl-C was pressed meanwhile. */
bool cli_was_interrupted(void);
/** The exit code after an answer was printed: `result`, or, if Ctrl-C was pressed, CLI_INTERRUPTED, with a note. */
cli_exit cli_end_of_answer(cli_exit result);

/* ---- suggestions ---- */

/** The candidate that was probably meant by a word, or NULL. candidate(context, i): NULL past the end. */
const char *cli_nearest(const char *word, const char *(*candidate)(const void *context, int index),
                        const void *context);
/** A text for a terminal or a JSON string: no control characters, valid UTF-8. */
const char *cli_clean(const char *text, char *out, size_t size);

#endif
