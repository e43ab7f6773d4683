/*
 * Files of problems as texts, and refusals of texts with the place that they name.
 */
#ifndef TEST_IO_TEXTS_H
#define TEST_IO_TEXTS_H

#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <cairn/io.h>

/* The examples of docs/reference/formats/chain.md and graph.md; their hashes are part of the format. */
static const char chain_text[] =
    "{\"format\": \"cairn-chain\", \"version\": 1, \"name\": \"gpt2 b4 s256\",\n"
    " \"provenance\": {\"model\": \"gpt2\", \"device\": \"cpu\", \"torch\": \"2.13.0\"},\n"
    " \"fixed_bytes\": 0,\n"
    " \"input_bytes\": 4096, \"input_grad_bytes\": 4096,\n"
    " \"stages\": [\n"
    "   {\"name\": \"h.0\", \"output_bytes\": 4096, \"grad_bytes\": 4096, \"weight_grad_bytes\": 8192, "
    "\"no_recompute\": false,\n"
    "    \"forward_only_ns\": 950, \"forward_only_workspace_bytes\": 32768,\n"
    "    \"saved_bytes\": 65536, \"forward_ns\": 1000, \"backward_ns\": 2000,\n"
    "    \"forward_workspace_bytes\": 0, \"backward_workspace_bytes\": 0},\n"
    "   {\"name\": \"h.1\", \"output_bytes\": 4096,\n"
    "    \"options\": [\n"
    "      {\"name\": \"keep\",      \"saved_bytes\": 65536, \"forward_ns\": 1000, \"backward_ns\": 2000},\n"
    "      {\"name\": \"selective\", \"saved_bytes\": 20480, \"forward_ns\": 1000, \"backward_ns\": 2600, "
    "\"backward_workspace_bytes\": 45056}]}],\n"
    " \"machine\": {\"host_bytes\": 1073741824, \"to_host_bytes_per_s\": 12000000000, \"to_device_bytes_per_s\": "
    "12000000000,\n"
    "             \"shared_link\": false, \"latency_ns\": 10000}}\n";
static const char chain_hash[] = "sha256:3fc20707407bba8b911106c7c1abda2207969a355c30f0b5666fd6c7e519f6b2";

static const char graph_text[] =
    "{\"format\": \"cairn-graph\", \"version\": 1, \"name\": \"resnet50 b184\", \"provenance\": {}, \"fixed_bytes\": "
    "0,\n"
    " \"nodes\": [\n"
    "   {\"name\": \"conv1\", \"cost_ns\": 1000, \"bytes\": 65536, \"workspace_bytes\": 0, \"deps\": [],\n"
    "    \"alias_of\": null, \"keep\": false, \"no_recompute\": false},\n"
    "   {\"name\": \"relu1\", \"cost_ns\": 100, \"bytes\": 65536, \"deps\": [0]}],\n"
    " \"backward_begins_at\": 1}\n";
static const char graph_hash[] = "sha256:173b6aa0575166c951a0ae7fee59ab5781050e7be4cb324f98c551c8e77194f2";

static inline cairn_problem *read_problem(const char *text)
{
    cairn_problem *problem;
    cairn_error error;
    if (cairn_problem_read(NULL, text, strlen(text), &problem, &error) != CAIRN_OK)
        fail_msg("%lld:%lld: %s: %s", (long long)error.line, (long long)error.column, error.path, error.message);
    return problem;
}

#define SCHEDULE(hash, ops)                                                                                 \
    "{\"format\":\"cairn-schedule\",\"version\":1,\"problem\":{\"format\":\"cairn-chain\",\"hash\":\"" hash \
    "\"},\n\"ops\":[" ops "]}"
#define OPS(ops) SCHEDULE("sha256:3fc20707407bba8b911106c7c1abda2207969a355c30f0b5666fd6c7e519f6b2", ops)

#endif
