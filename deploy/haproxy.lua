-- HAProxy's HTTP parser answers an invalid request with a fixed HTML page, to which no `http-error` directive applies. This
-- filter of the TCP frontend replaces that page. Its header name has capitals; other responses have lower-case header names.
local MARK = "\r\nContent-Type: text/html\r\n\r\n<html><body><h1>"

local ERRORS = {
    ["408"] = {"408 Request Timeout", "the request's headers were not complete in time", "invalid_request_error", "timeout"},
    ["500"] = {"500 Internal Server Error", "the proxy failed", "server_error", "internal_error"},
}
local BAD = {"400 Bad Request", "the bytes sent are not a valid HTTP/1.1 request", "invalid_request_error", "bad_request"}

local Errors = {id = "JSON errors"}
Errors.__index = Errors

function Errors:new()
    return setmetatable({}, Errors)
end

function Errors:start_analyze(txn, channel)
    if channel:is_resp() then
        filter.register_data_filter(self, channel)
    end
end

function Errors:tcp_payload(txn, channel)
    local num_bytes = channel:input()
    if num_bytes == 0 then
        return 0
    end
    local data = channel:data()
    local mark = data and data:find(MARK, 1, true)
    if not mark then
        return num_bytes
    end
    -- The page ends the connection; answers to earlier requests may precede it.
    local start, status = 1, nil
    for position, code in data:sub(1, mark):gmatch("()HTTP/1%.1 (%d%d%d) ") do
        start, status = position, code
    end
    local error = ERRORS[status] or BAD
    local body = string.format(
        '{"error": {"message": "%s", "type": "%s", "param": null, "code": "%s"}}', error[2], error[3], error[4])
    channel:set(data:sub(1, start - 1) .. string.format(
        "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\nx-request-id: req_%s\r\n\r\n%s",
        error[1], #body, txn.f:uuid(), body))
    return channel:input()
end

core.register_filter("json_errors", Errors, function(instance, arguments)
    return instance
end)
