#include "io/json_fields.h"

#include <string.h>

static const char *type_name(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "a list";
    case JSON_STRING:
        return "a text";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number with a fraction or an exponent";
    case JSON_TRUE:
        return "true";
    case JSON_FALSE:
        return "false";
    default:
        return "null";
    }
}

cairn_status crn_type_fail(const json_t *value, const char *wanted, const crn_path *path, cairn_error *error)
{
    return crn_path_fail(error, CAIRN_BAD_INPUT, path, "%s where %s is expected", type_name(value), wanted);
}

cairn_status crn_integer_read(const json_t *value, int64_t *integer, const crn_path *path, cairn_error *error)
{
    if (!json_is_integer(value))
        return crn_type_fail(value, "an integer", path, error);
    *integer = json_integer_value(value);
    return CAIRN_OK;
}

cairn_status crn_index_read(const json_t *value, int32_t *index, const crn_path *path, cairn_error *error)
{
    int64_t integer = 0;
    CRN_TRY(crn_integer_read(value, &integer, path, error));
    if (integer < 0 || integer > INT32_MAX)
        return crn_path_fail(error, CAIRN_BAD_INPUT, path, "%lld is not an index", (long long)integer);
    *index = (int32_t)integer;
    return CAIRN_OK;
}

static cairn_status read_count(const json_t *value, int64_t *count, const crn_path *path, cairn_error *error)
{
    int64_t integer = 0;
    CRN_TRY(crn_integer_read(value, &integer, path, error));
    if (integer < 0)
        return crn_path_fail(error, CAIRN_BAD_INPUT, path, "%lld; at least 0", (long long)integer);
    *count = integer;
    return CAIRN_OK;
}

static cairn_status read_text(const json_t *value, const char **text, crn_arena *arena, const crn_path *path,
                              cairn_error *error)
{
    if (!json_is_string(value))
        return crn_type_fail(value, "a text", path, error);
    *text = crn_arena_text(arena, json_string_value(value));
    return *text ? CAIRN_OK : crn_no_memory(error);
}

cairn_status crn_field_read(const json_t *value, const crn_field *fields, size_t i, crn_target *target,
                            const crn_path *path, cairn_error *error)
{
    void *place = (char *)target->structure + fields[i].offset;
    if (json_is_null(value) && (fields[i].rules & CRN_NULLABLE))
        return CAIRN_OK;
    target->seen |= (uint64_t)1 << i;
    switch (fields[i].type) {
    case CRN_FIELD_COUNT:
        return read_count(value, place, path, error);
    case CRN_FIELD_SIGNED:
        return crn_integer_read(value, place, path, error);
    case CRN_FIELD_TEXT:
        return read_text(value, place, target->arena, path, error);
    case CRN_FIELD_BOOL:
        if (!json_is_boolean(value))
            return crn_type_fail(value, "true or false", path, error);
        *(bool *)place = json_is_true(value);
        return CAIRN_OK;
    case CRN_FIELD_LIST:
        if (!json_is_array(value))
            return crn_type_fail(value, "a list", path, error);
        *(const json_t **)place = value;
        return CAIRN_OK;
    case CRN_FIELD_STREAM:
        break;
    }
    return crn_fail(error, CAIRN_INTERNAL, "field %s is not read from a value", fields[i].name);
}

size_t crn_field_find(const crn_field *fields, size_t count, const char *name)
{
    size_t i = 0;
    while (i < count && strcmp(fields[i].name, name) != 0)
        i++;
    return i;
}

cairn_status crn_field_unknown(const crn_field *fields, size_t count, const crn_path *path, cairn_error *error)
{
    const char *near = NULL;
    int32_t least = INT32_MAX;
    for (size_t i = 0; i < count; i++) {
        int32_t slips = cairn_slips(path->field, fields[i].name);
        if (slips >= 0 && slips < least) {
            near = fields[i].name;
            least = slips;
        }
    }
    if (near)
        return crn_path_fail(error, CAIRN_BAD_INPUT, path, "unknown field; did you mean \"%s\"?", near);
    return crn_path_fail(error, CAIRN_BAD_INPUT, path, "unknown field");
}

cairn_status crn_fields_check(const crn_field *fields, size_t count, uint64_t seen, const crn_path *path,
                              cairn_error *error)
{
    for (size_t i = 0; i < count; i++)
        if ((fields[i].rules & CRN_REQUIRED) && !(seen >> i & 1))
            return crn_path_fail(error, CAIRN_BAD_INPUT, path, "%s is missing", fields[i].name);
    return CAIRN_OK;
}

cairn_status crn_fields_read(json_t *object, const crn_field *fields, size_t count, crn_target *target,
                             const crn_path *path, cairn_error *error)
{
    const char *key;
    json_t *value;
    if (!json_is_object(object))
        return crn_type_fail(object, "an object", path, error);
    json_object_foreach(object, key, value)
    {
        crn_path here = {path, key, 0};
        size_t i = crn_field_find(fields, count, key);
        if (i == count)
            return crn_field_unknown(fields, count, &here, error);
        CRN_TRY(crn_field_read(value, fields, i, target, &here, error));
    }
    return crn_fields_check(fields, count, target->seen, path, error);
}
