/* Tensors over parts of one tensor's memory, each with a storage of its own: by DLPack, in one call for all. (A slice of
 * a tensor shares its storage; to a compiled graph, tensors with one storage are related.)
 *
 * The parts keep the whole alive: it is given back with the last of them, in whatever thread that is. */

#include <stdint.h>
#include <stdlib.h>

#define NAME "dltensor" /* of a capsule whose tensor nobody has taken */
#define SIGNED_INTEGER 0

/* Of Python, as in its stable interface: its header need not be there. Callers hold Python's lock. */
typedef struct _object object;
extern object *PyList_New(intptr_t size);
extern int PyList_SetItem(object *list, intptr_t index, object *item);
extern object *PyCapsule_New(void *pointer, const char *name, void (*destroy)(object *));
extern void *PyCapsule_GetPointer(object *capsule, const char *name);
extern int PyCapsule_IsValid(object *capsule, const char *name);
extern int PyCapsule_SetName(object *capsule, const char *name);
extern object *PyObject_CallFunctionObjArgs(object *function, ...);
extern object *PyErr_NoMemory(void);
extern void Py_DecRef(object *);

struct dl_tensor { /* DLPack's DLTensor */
    void *data;
    int32_t device_type, device_id, dimensions;
    uint8_t type_code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct dl_managed { /* DLManagedTensor */
    struct dl_tensor tensor;
    void *context;
    void (*give_back)(struct dl_managed *);
};

struct part {
    int64_t offset, size; /* in bytes; in elements */
    int64_t type_code, bits;
};

struct piece {
    struct dl_managed managed; /* first: its address is the piece's */
    int64_t size, stride;
};

struct pieces {
    struct dl_managed *whole;
    int64_t used; /* pieces that are not given back */
    struct piece pieces[];
};

static void give_back(struct dl_managed *piece)
{
    struct pieces *all = piece->context;
    if (__atomic_sub_fetch(&all->used, 1, __ATOMIC_ACQ_REL)) return;
    if (all->whole->give_back) all->whole->give_back(all->whole);
    free(all);
}

/* With n pieces, which are not described yet; NULL where there is no memory left. */
static struct pieces *new_pieces(struct dl_managed *whole, int64_t n)
{
    struct pieces *all = malloc(sizeof *all + n * sizeof all->pieces[0]);
    if (all) all->whole = whole, all->used = n;
    return all;
}

static void describe(struct pieces *all, int64_t i, struct part part)
{
    struct piece *piece = &all->pieces[i];
    struct dl_tensor *tensor = &piece->managed.tensor;
    *tensor = all->whole->tensor;
    tensor->data = (char *)tensor->data + tensor->byte_offset + part.offset;
    tensor->byte_offset = 0;
    tensor->type_code = (uint8_t)part.type_code, tensor->bits = (uint8_t)part.bits, tensor->lanes = 1;
    piece->size = part.size, piece->stride = 1;
    tensor->dimensions = 1, tensor->shape = &piece->size, tensor->strides = &piece->stride;
    piece->managed.context = all, piece->managed.give_back = give_back;
}

/* A list of tensors, each made by `from_dlpack`. NULL, with Python's exception, where that fails. */
static object *as_tensors(struct pieces *all, int64_t n, object *from_dlpack)
{
    object *tensors = PyList_New(n);
    int64_t made = 0;
    int complete = 0;
    for (; tensors && made < n; made++) {
        object *capsule = PyCapsule_New(&all->pieces[made].managed, NAME, NULL);
        object *tensor = capsule ? PyObject_CallFunctionObjArgs(from_dlpack, capsule, NULL) : NULL;
        int taken = capsule && !PyCapsule_IsValid(capsule, NAME); /* it has another name then */
        if (capsule) Py_DecRef(capsule);
        if (!tensor) {
            made += taken;
            break;
        }
        PyList_SetItem(tensors, made, tensor);
        complete = made + 1 == n;
    }
    if (complete) return tensors;
    for (int64_t i = made; i < n; i++) give_back(&all->pieces[i].managed); /* nobody else does */
    if (tensors) Py_DecRef(tensors);
    return NULL;
}

/* The whole, which is the pieces' from now on. */
static struct pieces *split(object *capsule, int64_t n)
{
    struct dl_managed *whole = PyCapsule_GetPointer(capsule, NAME);
    struct pieces *all = whole ? new_pieces(whole, n) : NULL;
    if (whole && !all) PyErr_NoMemory();
    if (all) PyCapsule_SetName(capsule, "used_dltensor"); /* so that the capsule does not give it back */
    return all;
}

/* `capsule`: a tensor's, of which there is at least one part. */
object *fs_split_memory(object *capsule, object *from_dlpack, const struct part *parts, int64_t n)
{
    struct pieces *all = split(capsule, n);
    for (int64_t i = 0; all && i < n; i++) describe(all, i, parts[i]);
    return all ? as_tensors(all, n, from_dlpack) : NULL;
}

/* The same for arrays of int64: `extents` are offsets, from element `first` on, and sizes. */
object *fs_split_arrays(object *capsule, object *from_dlpack, const int64_t *extents, int64_t n, int64_t first)
{
    struct pieces *all = split(capsule, n);
    for (int64_t i = 0; all && i < n; i++)
        describe(all, i, (struct part){8 * (first + extents[2 * i]), extents[2 * i + 1], SIGNED_INTEGER, 64});
    return all ? as_tensors(all, n, from_dlpack) : NULL;
}
