-- prefix, id, owner, metadata, now
local key = conversation_key(ARGV[2])
if redis.call('EXISTS', key) == 0 then
  redis.call('HSET', key, 'owner', ARGV[3], 'metadata', ARGV[4], 'created', ARGV[5], 'rev', 0)
  touch(ARGV[2], ARGV[5])
end
return field(key, 'rev')
