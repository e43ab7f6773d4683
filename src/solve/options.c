/*
 * The options of a solve: one table for the command line, Python and the tests.
 *
 * Every value is an int64_t in one array, CAIRN_NONE where it was not set (a choice is the number of the choice, a
 * flag 0 or 1), but for the solver's name. Resolving turns the array into the settings that solvers read.
 *
 * Some options are certain solvers' own (crn_solver.options). Set for another solver they would be ignored, so they are
 * refused there.
 */
#include "solve/options.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "solve/host_memory.h"

typedef enum option_id {
    BUDGET,
    SOLVER,
    HOST_BUDGET,
    TO_HOST,
    TO_DEVICE,
    SHARED_LINK,
    LATENCY,
    SLOTS,
    SEGMENTS,
    TIME_LIMIT,
    ITERATIONS,
    SEED,
    THREADS,
    MEMORY_LIMIT,
    MINIMIZE,
    OBJECTIVE,
    OPTION_COUNT
} option_id;

enum { SLOTS_DEFAULT = 500, SLOTS_MAX = 1000000, THREADS_MAX = 256 };

static const cairn_option_info table[OPTION_COUNT] = {
    [BUDGET] = {"budget", CAIRN_OPTION_SIZE, 0, INT64_MAX, NULL, "required",
                "device memory, fixed bytes and the input included; \"none\" for no limit"},
    [SOLVER] = {"solver", CAIRN_OPTION_TEXT, 0, 0, NULL, "auto", "name of the solver"},
    [HOST_BUDGET] = {"host-budget", CAIRN_OPTION_SIZE, 0, INT64_MAX, NULL, "the problem's",
                     "host memory to offload to"},
    [TO_HOST] = {"to-host", CAIRN_OPTION_RATE, 1, INT64_MAX, NULL, "the problem's", "speed of the link to the host"},
    [TO_DEVICE] = {"to-device", CAIRN_OPTION_RATE, 1, INT64_MAX, NULL, "the problem's",
                   "speed of the link to the device"},
    [SHARED_LINK] = {"shared-link", CAIRN_OPTION_FLAG, 0, 1, NULL, "the problem's", "both directions share one link"},
    [LATENCY] = {"latency", CAIRN_OPTION_DURATION, 0, INT64_MAX, NULL, "the problem's",
                 "time that every transfer takes beside its bytes"},
    [SLOTS] = {"slots", CAIRN_OPTION_COUNT, 1, SLOTS_MAX, NULL, "500", "memory slots of the slotted programs"},
    [SEGMENTS] = {"segments", CAIRN_OPTION_COUNT, 1, CAIRN_STAGES_MAX, NULL, "the best number",
                  "segments of the periodic solver"},
    [TIME_LIMIT] = {"time-limit", CAIRN_OPTION_DURATION, 0, INT64_MAX, NULL, "none: limited by work",
                    "stop by the clock with the best answer so far"},
    [ITERATIONS] = {"iterations", CAIRN_OPTION_COUNT, 0, INT64_MAX, NULL, "chosen by size", "work limit of searches"},
    [SEED] = {"seed", CAIRN_OPTION_COUNT, 0, INT64_MAX, NULL, "0", "seed of searches"},
    [THREADS] = {"threads", CAIRN_OPTION_COUNT, 1, THREADS_MAX, NULL, "all cores",
                 "threads; answers do not depend on it"},
    [MEMORY_LIMIT] = {"memory-limit", CAIRN_OPTION_SIZE, 0, INT64_MAX, NULL,
                      "half of the machine's, or of what a container or ulimit -v leaves",
                      "memory of the solver itself; it refuses beforehand rather than exceed it"},
    [MINIMIZE] = {"minimize", CAIRN_OPTION_CHOICE, 0, 1, "time|memory", "time", "what the answer is best in"},
    [OBJECTIVE] = {"objective", CAIRN_OPTION_CHOICE, 0, 1, "eq9|eq6", "eq9", "objective of brute-select"},
};

struct cairn_options {
    cairn_allocator allocator;
    int64_t values[OPTION_COUNT];
    bool has_budget; /* "none" is a budget, too */
    char solver[sizeof(((crn_settings *)0)->solver)];
};

const cairn_option_info *cairn_option_at(int index)
{
    return index >= 0 && index < OPTION_COUNT ? &table[index] : NULL;
}

static void set_defaults(cairn_options *options)
{
    for (int id = 0; id < OPTION_COUNT; id++)
        options->values[id] = CAIRN_NONE;
    options->has_budget = false;
    snprintf(options->solver, sizeof(options->solver), "auto");
}

cairn_status cairn_options_new(const cairn_env *env, cairn_options **options, cairn_error *error)
{
    cairn_allocator allocator = crn_allocator(env);
    *options = crn_alloc(&allocator, 1, sizeof(**options));
    if (!*options)
        return crn_no_memory(error);
    (*options)->allocator = allocator;
    set_defaults(*options);
    return CAIRN_OK;
}

void cairn_options_free(cairn_options *options)
{
    if (options) {
        cairn_allocator allocator = options->allocator;
        crn_free(&allocator, options, 1, sizeof(*options));
    }
}

/* ---- who takes what ---- */

/* What a solver that has not got it refuses. A limit on work, or a seed, leaves it nothing to do otherwise. */
static const option_id refusable[] = {SLOTS, SEGMENTS, OBJECTIVE};

enum { REFUSABLE_COUNT = sizeof(refusable) / sizeof(refusable[0]) };

static bool has_option(const crn_solver *solver, const char *name)
{
    const char *word = solver->options;
    size_t length = strlen(name);
    while (word && *word) {
        size_t word_length = strcspn(word, " ");
        if (word_length == length && memcmp(word, name, length) == 0)
            return true;
        word += word_length + strspn(word + word_length, " ");
    }
    return false;
}

bool cairn_solver_has_option(const char *solver, const char *option)
{
    const crn_solver *found = crn_solver_find(solver);
    return found && option && has_option(found, option);
}

enum { OPTION_WORDS_MAX = 64 };

/* "objective=eq9" of a choice, else the option's name. */
static const char *option_words(option_id id, int64_t value, char words[OPTION_WORDS_MAX])
{
    const cairn_option_info *info = &table[id];
    if (info->type != CAIRN_OPTION_CHOICE)
        return info->name;
    const char *choice = info->choices;
    for (int64_t i = 0; i < value; i++)
        choice += strcspn(choice, "|") + 1;
    snprintf(words, OPTION_WORDS_MAX, "%s=%.*s", info->name, (int)strcspn(choice, "|"), choice);
    return words;
}

/* Whether a solver takes this value of an option. Of a choice it may have just one: that of "objective=eq9". */
static bool has_value(const crn_solver *solver, option_id id, int64_t value)
{
    char words[OPTION_WORDS_MAX];
    return has_option(solver, table[id].name) || has_option(solver, option_words(id, value, words));
}

bool crn_solver_takes_objective(const crn_solver *solver, const crn_settings *settings)
{
    return (!settings->objective_eq9 || has_value(solver, OBJECTIVE, 0)) &&
           (!settings->objective_eq6 || has_value(solver, OBJECTIVE, 1));
}

static bool is_auto(const crn_solver *solver)
{
    return strcmp(solver->info.name, "auto") == 0;
}

/* auto takes what one of those takes that it asks about this problem. */
static bool takes(const crn_solver *solver, option_id id, int64_t value, const crn_task *task)
{
    if (!is_auto(solver))
        return has_value(solver, id, value);
    for (const crn_solver *const *other = crn_solvers; *other; other++)
        if (!is_auto(*other) && has_value(*other, id, value) && crn_solver_accepts(*other, task, NULL) == CAIRN_OK)
            return true;
    return false;
}

/* What a solver that auto would ask says of the value itself: "6 segments of a chain of 5 stages". */
static cairn_status refuse_value(option_id id, int64_t value, const crn_task *task, cairn_error *error)
{
    for (const crn_solver *const *other = crn_solvers; *other; other++)
        if (!is_auto(*other) && has_value(*other, id, value) &&
            crn_solver_accepts(*other, task, error) == CAIRN_BAD_INPUT)
            return CAIRN_BAD_INPUT;
    return CAIRN_OK;
}

static cairn_status refuse(const crn_solver *solver, option_id id, int64_t value, cairn_error *error)
{
    char words[OPTION_WORDS_MAX];
    const char *path = table[id].name, *name = option_words(id, value, words);
    char others[CAIRN_ERROR_MESSAGE_MAX / 2] = "";
    size_t length = 0;
    for (const crn_solver *const *other = crn_solvers; *other; other++)
        if (has_value(*other, id, value) && !is_auto(*other) && length < sizeof(others))
            length += (size_t)snprintf(others + length, sizeof(others) - length, "%s%s", length ? ", " : "",
                                       (*other)->info.name);
    if (solver && is_auto(solver))
        return crn_fail_at(
            error, CAIRN_UNSUPPORTED, CAIRN_NONE, path,
            "none of the solvers that auto asks about this problem takes option %s; these solvers do: %s", name,
            others);
    return crn_fail_at(error, CAIRN_UNSUPPORTED, CAIRN_NONE, path, "%s takes no option %s; these do: %s",
                       solver ? solver->info.name : "a bound", name, others);
}

cairn_status crn_options_check(const cairn_options *options, const crn_solver *solver, const crn_task *task,
                               cairn_error *error)
{
    for (int i = 0; options && i < REFUSABLE_COUNT; i++) {
        int64_t value = options->values[refusable[i]];
        if (value == CAIRN_NONE || (solver && takes(solver, refusable[i], value, task)))
            continue;
        if (solver && is_auto(solver))
            CRN_TRY(refuse_value(refusable[i], value, task, error));
        return refuse(solver, refusable[i], value, error);
    }
    return CAIRN_OK;
}

/* ---- setting ---- */

static cairn_status find_option(const char *name, option_id *id, cairn_error *error)
{
    for (int i = 0; name && i < OPTION_COUNT; i++)
        if (strcmp(table[i].name, name) == 0) {
            *id = (option_id)i;
            return CAIRN_OK;
        }
    return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, name, "there is no option \"%s\"", name ? name : "");
}

static cairn_status store(cairn_options *options, option_id id, int64_t value, cairn_error *error)
{
    const cairn_option_info *info = &table[id];
    if (value < info->min || value > info->max)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, info->name,
                           "option %s is %lld; it goes from %lld to %lld", info->name, (long long)value,
                           (long long)info->min, (long long)info->max);
    options->values[id] = value;
    options->has_budget |= id == BUDGET;
    return CAIRN_OK;
}

static cairn_status parse_count(const char *text, int64_t *value, cairn_error *error)
{
    int64_t sum = 0;
    const char *digit = text;
    for (; *digit >= '0' && *digit <= '9'; digit++)
        if (!crn_mul(sum, 10, &sum) || !crn_add(sum, *digit - '0', &sum))
            return crn_fail(error, CAIRN_BAD_INPUT, "\"%s\" passes 2^63 - 1", text);
    if (digit == text || *digit != '\0')
        return crn_fail(error, CAIRN_BAD_INPUT, "\"%s\" is not an integer of at least 0", text);
    *value = sum;
    return CAIRN_OK;
}

/* The number of a choice in "first|second|...". */
static cairn_status parse_choice(const char *choices, const char *text, int64_t *value, cairn_error *error)
{
    const char *choice = choices;
    size_t length = strlen(text);
    for (int64_t i = 0; choice; i++) {
        size_t choice_length = strcspn(choice, "|");
        if (choice_length == length && memcmp(choice, text, length) == 0) {
            *value = i;
            return CAIRN_OK;
        }
        choice = choice[choice_length] ? choice + choice_length + 1 : NULL;
    }
    return crn_fail(error, CAIRN_BAD_INPUT, "\"%s\" is not one of %s", text, choices);
}

static cairn_status parse_value(const cairn_option_info *info, const char *text, int64_t *value, cairn_error *error)
{
    switch (info->type) {
    case CAIRN_OPTION_SIZE:
        return cairn_parse_size(text, value, error);
    case CAIRN_OPTION_RATE:
        return cairn_parse_rate(text, value, error);
    case CAIRN_OPTION_DURATION:
        return info == &table[LATENCY] ? crn_parse_latency(text, value, error)
                                       : cairn_parse_duration(text, value, error);
    case CAIRN_OPTION_COUNT:
        return parse_count(text, value, error);
    case CAIRN_OPTION_CHOICE:
        return parse_choice(info->choices, text, value, error);
    case CAIRN_OPTION_FLAG:
        return parse_choice("false|true", text, value, error);
    case CAIRN_OPTION_TEXT:
        break;
    }
    return crn_fail(error, CAIRN_INTERNAL, "option %s has no parser", info->name);
}

static cairn_status set_solver(cairn_options *options, const char *name, cairn_error *error)
{
    if (!crn_solver_find(name))
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, "solver",
                           "there is no solver \"%s\"; `cairn solvers` lists them", name);
    snprintf(options->solver, sizeof(options->solver), "%s", name);
    return CAIRN_OK;
}

cairn_status cairn_options_set(cairn_options *options, const char *name, const char *value, cairn_error *error)
{
    option_id id = OPTION_COUNT;
    int64_t number;
    cairn_error why;
    CRN_TRY(find_option(name, &id, error));
    if (!value)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, name, "option %s needs a value", name);
    if (id == SOLVER)
        return set_solver(options, value, error);
    if (id == BUDGET && strcmp(value, "none") == 0) {
        options->values[BUDGET] = CAIRN_NONE;
        options->has_budget = true;
        return CAIRN_OK;
    }
    if (parse_value(&table[id], value, &number, &why) != CAIRN_OK)
        return crn_fail_at(error, why.status, CAIRN_NONE, name, "option %s: %s%s", name, why.message,
                           id == BUDGET && !isdigit((unsigned char)*value) ? "; or none" : "");
    return store(options, id, number, error);
}

cairn_status cairn_options_set_int(cairn_options *options, const char *name, int64_t value, cairn_error *error)
{
    option_id id = OPTION_COUNT;
    CRN_TRY(find_option(name, &id, error));
    if (table[id].type == CAIRN_OPTION_TEXT || table[id].type == CAIRN_OPTION_CHOICE)
        return crn_fail_at(error, CAIRN_BAD_INPUT, CAIRN_NONE, name, "option %s is a text, not a number", name);
    return store(options, id, value, error);
}

cairn_status cairn_options_for(const cairn_env *env, const cairn_options *options, const char *solver,
                               cairn_options **copy, cairn_error *error)
{
    cairn_options *made;
    *copy = NULL;
    CRN_TRY(cairn_options_new(env, &made, error));
    cairn_allocator allocator = made->allocator;
    *made = *options;
    made->allocator = allocator;
    cairn_status status = cairn_options_set(made, "solver", solver, error);
    if (status != CAIRN_OK) {
        cairn_options_free(made);
        return status;
    }
    for (int i = 0; i < REFUSABLE_COUNT; i++)
        if (!has_value(crn_solver_find(solver), refusable[i], made->values[refusable[i]]))
            made->values[refusable[i]] = CAIRN_NONE;
    *copy = made;
    return CAIRN_OK;
}

/* ---- resolving ---- */

static bool has_machine_option(const cairn_options *options)
{
    const int64_t *values = options->values;
    return values[HOST_BUDGET] != CAIRN_NONE || values[TO_HOST] != CAIRN_NONE || values[TO_DEVICE] != CAIRN_NONE ||
           values[SHARED_LINK] != CAIRN_NONE || values[LATENCY] != CAIRN_NONE;
}

static int64_t value_or(int64_t value, int64_t fallback)
{
    return value != CAIRN_NONE ? value : fallback;
}

static void override(int64_t value, int64_t *field)
{
    if (value != CAIRN_NONE)
        *field = value;
}

static cairn_status resolve_machine(const cairn_options *options, const cairn_machine *own, crn_settings *settings,
                                    cairn_error *error)
{
    const int64_t *values = options->values;
    cairn_machine *machine = &settings->machine;
    if (!has_machine_option(options))
        return CAIRN_OK;
    if (own)
        *machine = *own;
    else if (values[HOST_BUDGET] == CAIRN_NONE || values[TO_HOST] == CAIRN_NONE || values[TO_DEVICE] == CAIRN_NONE)
        return crn_fail(error, CAIRN_BAD_INPUT,
                        "the problem has no machine: options host-budget, to-host and to-device are needed together");
    settings->has_machine = true;
    override(values[HOST_BUDGET], &machine->host_bytes);
    override(values[TO_HOST], &machine->to_host_bytes_per_s);
    override(values[TO_DEVICE], &machine->to_device_bytes_per_s);
    override(values[LATENCY], &machine->latency_ns);
    if (values[SHARED_LINK] != CAIRN_NONE)
        machine->shared_link = values[SHARED_LINK] != 0;
    return cairn_machine_check(machine, error);
}

cairn_status crn_options_resolve(const cairn_options *options, const cairn_problem *problem, crn_settings *settings,
                                 cairn_error *error)
{
    cairn_options defaults;
    set_defaults(&defaults);
    options = options ? options : &defaults;
    const int64_t *values = options->values;
    *settings = (crn_settings){
        .budget_bytes = values[BUDGET],
        .has_budget = options->has_budget,
        .slots = value_or(values[SLOTS], SLOTS_DEFAULT),
        .segments = values[SEGMENTS],
        .time_limit_ns = values[TIME_LIMIT],
        .iterations = values[ITERATIONS],
        .seed = value_or(values[SEED], 0),
        .threads = values[THREADS],
        .memory_limit_bytes = values[MEMORY_LIMIT],
        .memory_bytes = crn_memory_there_is(),
        .minimize_memory = values[MINIMIZE] == 1,
        .objective_eq9 = values[OBJECTIVE] == 0,
        .objective_eq6 = values[OBJECTIVE] == 1,
    };
    memcpy(settings->solver, options->solver, sizeof(settings->solver));
    return resolve_machine(options, cairn_problem_info_of(problem)->machine, settings, error);
}

int64_t crn_memory_limit(const crn_settings *settings)
{
    if (settings->memory_limit_bytes != CAIRN_NONE)
        return settings->memory_limit_bytes;
    return (settings->memory_bytes > 0 ? settings->memory_bytes : crn_memory_there_is()) / 2;
}

cairn_status cairn_options_machine(const cairn_options *options, const cairn_problem *problem, cairn_machine *machine,
                                   bool *present, cairn_error *error)
{
    crn_settings settings;
    const cairn_machine *own = cairn_problem_info_of(problem)->machine;
    *present = false;
    CRN_TRY(crn_options_resolve(options, problem, &settings, error));
    *present = settings.has_machine || own;
    if (*present)
        *machine = settings.has_machine ? settings.machine : *own;
    return CAIRN_OK;
}
