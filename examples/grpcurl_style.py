"""Calls the service knowing nothing of it: methods and messages come by reflection, as in grpcurl.

With grpcurl itself:
    grpcurl -plaintext -H "authorization: Bearer $QUADRIGA_API_KEY" \\
        -d '{"prompt": "The capital of France is", "max_tokens": 32}' \\
        127.0.0.1:9000 quadriga.v1.Quadriga/GenerateOnce
"""

import os
import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToJson, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

target = os.environ.get("QUADRIGA_GRPC", "127.0.0.1:9000")
question = " ".join(sys.argv[1:]) or "What is the capital of France?"
metadata = [("authorization", f"Bearer {os.environ['QUADRIGA_API_KEY']}")]

with grpc.insecure_channel(target) as channel:
    database = ProtoReflectionDescriptorDatabase(channel)
    print("services:", ", ".join(sorted(database.get_services())))
    service = DescriptorPool(database).FindServiceByName("quadriga.v1.Quadriga")
    print("methods:", ", ".join(method.name for method in service.methods))
    method = service.FindMethodByName("GenerateOnce")
    call = channel.unary_unary(
        f"/{service.full_name}/{method.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    chat = {"messages": [{"role": "user", "content": question}]}
    fields = {"chat": chat, "max_tokens": 64, "temperature": 0}
    request = ParseDict(fields, GetMessageClass(method.input_type)())
    print(MessageToJson(call(request, metadata=metadata, timeout=60)))
