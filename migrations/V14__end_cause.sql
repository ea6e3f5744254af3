-- The cause of a run's end that its finish reason does not tell, such as `client_stop`; null for an end by the answer.
alter table runs add column end_cause text;

-- Runs recorded before had the cause only in their message.
update runs set end_cause = case
        when message like 'the client stopped it%' then 'client_stop'
        when message like 'the client asked for another answer%' then 'regenerate'
        when message like 'the time is over%' then 'timeout'
    end
where finish_reason = 'cancelled' and message like 'the %';
update runs set end_cause = 'out_of_memory' where finish_reason = 'error' and message like 'llama.cpp cannot decode: out of memory%';
