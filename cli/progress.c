/*
 * What a long run needs: Ctrl-C asks the library to stop, and a terminal sees progress after the first second.
 *
 * The first Ctrl-C stops the solver, which answers with the best that it has; a second one ends the process, as it does
 * outside of a run. The flag is global, for a signal handler can reach nothing else; `current` is the run that it is of.
 */
#define _XOPEN_SOURCE 700
#include <signal.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"

static volatile sig_atomic_t interrupted;

typedef struct watch {
    cairn_env env;
    const char *what;
    struct sigaction before;
    bool terminal, shown;
    double begun_s, printed_s;
    cairn_progress news; /* the latest; phase NULL: none yet */
} watch;

static watch current;

static void on_interrupt(int signal_number)
{
    (void)signal_number;
    interrupted = 1;
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Most polls only ask whether to stop and carry no progress: the latest progress stays. */
static void take_news(watch *w, const cairn_progress *progress)
{
    int64_t best_ns = progress->best_ns != CAIRN_NONE ? progress->best_ns : w->news.best_ns;
    if (progress->total <= 0 && progress->best_ns == CAIRN_NONE)
        return;
    w->news = *progress;
    w->news.best_ns = best_ns;
}

/* In one piece, so that nothing that others print comes between its parts. */
static void show(watch *w)
{
    char time[32], share[16] = "", best[48] = "", line[256];
    const cairn_progress *news = &w->news;
    double elapsed_s = now_s() - w->begun_s;
    if (elapsed_s < 1 || now_s() - w->printed_s < 0.2)
        return;
    if (news->done >= 0 && news->total > 0)
        snprintf(share, sizeof(share), " %.0f %%", 100 * (double)news->done / (double)news->total);
    if (news->best_ns != CAIRN_NONE)
        snprintf(best, sizeof(best), ", best %s", cairn_format_ns(news->best_ns, time, sizeof(time)));
    snprintf(line, sizeof(line), "\r%s: %.0f s%s%s%s%s\033[K", w->what, elapsed_s, news->phase ? ", " : "",
             news->phase ? news->phase : "", share, best);
    (void)fputs(line, stderr);
    w->printed_s = now_s();
    w->shown = true;
}

static int poll_watch(void *context, const cairn_progress *progress)
{
    watch *w = context;
    if (w->terminal && progress) {
        take_news(w, progress);
        show(w);
    }
    return interrupted;
}

const cairn_env *cli_watch_begin(const char *what)
{
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    current = (watch){.what = what, .terminal = isatty(STDERR_FILENO) != 0, .begun_s = now_s()};
    current.news.best_ns = CAIRN_NONE;
    current.env = (cairn_env){.poll = poll_watch, .poll_context = &current};
    sigaction(SIGINT, &action, &current.before);
    if (current.before.sa_handler == SIG_IGN) /* of a background job: stays ignored */
        sigaction(SIGINT, &current.before, NULL);
    return &current.env;
}

void cli_watch_end(void)
{
    sigaction(SIGINT, &current.before, NULL);
    if (current.shown)
        fprintf(stderr, "\r\033[K");
}

bool cli_was_interrupted(void)
{
    return interrupted != 0;
}

cli_exit cli_end_of_answer(cli_exit result)
{
    if (!interrupted)
        return result;
    cli_note("interrupted: this is what was found by then; with more time it may be better");
    return CLI_INTERRUPTED;
}
