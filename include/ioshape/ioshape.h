/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libioshape: checkpoint I/O in an orderly convoy. This header includes all that a trainer needs.
 * ioshape/probe.h (experimental) stands by itself.
 */
#ifndef IOSHAPE_IOSHAPE_H
#define IOSHAPE_IOSHAPE_H

#include <ioshape/container.h>
#include <ioshape/context.h>
#include <ioshape/errors.h>
#include <ioshape/file.h>
#include <ioshape/group.h>
#include <ioshape/slots.h>
#include <ioshape/tensors.h>
#include <ioshape/version.h>

#endif
