/* A program of a user's, built against the installed package only. */
#include <cairn/cairn.h>
#include <stdio.h>

int main(void)
{
    const cairn_stage_option keep = {.name = "keep", .saved_bytes = 20, .forward_ns = 5, .backward_ns = 10};
    const cairn_stage stage = {.name = "only",
                               .output_bytes = 10,
                               .grad_bytes = 10,
                               .forward_only_ns = 5,
                               .option_count = 1,
                               .options = &keep};
    const cairn_chain chain = {.input_bytes = 10, .input_grad_bytes = 10, .stage_count = 1, .stages = &stage};
    cairn_problem *problem;
    cairn_error error;
    if (cairn_problem_new_chain(NULL, &chain, NULL, &problem, &error) != CAIRN_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    printf("cairn %s: %s\n", cairn_version(), cairn_problem_hash(problem));
    cairn_problem_free(problem);
    return 0;
}
