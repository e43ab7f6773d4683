/*
 * Cairn: which activations to keep, recompute or send to host memory, so that a step fits a byte budget.
 * Umbrella header.
 */
#ifndef CAIRN_CAIRN_H
#define CAIRN_CAIRN_H

#include <cairn/base.h>
#include <cairn/exec.h>
#include <cairn/io.h>
#include <cairn/problem.h>
#include <cairn/report.h>
#include <cairn/schedule.h>
#include <cairn/solve.h>

#endif
